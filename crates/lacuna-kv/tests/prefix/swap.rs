//! Sequences whose pages are moved to a swap file while others use the groups they begin with: those stay in memory,
//! and what comes back goes on behind them.

use std::collections::HashMap;
use std::io;
use std::sync::Mutex;
use std::time::Instant;

use lacuna_kv::prefix::{Namespace, Path};
use lacuna_kv::swap::{Phase, Swap, SwapDevice, SwapSizes, Swapped};
use lacuna_pages::{ByteLength, guard};

use crate::folder::{LONG, first_bench, root, segments};
use crate::pages::{Bench, Held, prompt, tokens};

/// A disk in memory.
#[derive(Debug, Default)]
struct Disk(Mutex<HashMap<u64, Vec<u8>>>);

impl SwapDevice for Disk {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut held = self.0.lock().expect("no panic");
        held.insert(offset, bytes.to_vec());
        Ok(())
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        bytes.copy_from_slice(&self.0.lock().expect("no panic")[&offset]);
        Ok(())
    }

    fn discard_from(&self, offset: u64) {
        let mut held = self.0.lock().expect("no panic");
        held.retain(|&at, _| at < offset);
    }
}

/// A file in pieces of three pages, without a thread.
pub(crate) fn swap(bench: &Bench) -> Swap {
    let page = bench.kv.page_bytes() as u64;
    let sizes = SwapSizes {
        limit: ByteLength::new(4000 * page),
        piece: ByteLength::new(3 * page),
        block: ByteLength::new(20 * page),
    };
    Swap::over(Box::<Disk>::default(), sizes, &bench.kv).expect("it can be swapped")
}

fn settle(swap: &Swap) {
    while swap.advance() {}
}

/// A sequence whose pages are elsewhere.
struct Away {
    image: Swapped,
    path: Path,
    tokens: Vec<u32>,
}

impl Bench {
    /// Moves all pages of `held` out that nobody else has.
    fn send(&mut self, swap: &Swap, held: Held) -> Away {
        let group = self.cache.grain().group_tokens().get();
        let shared = self.cache.shared_groups(&held.path);
        let tokens = held.sequence.len();
        let image = swap.leave(held.sequence, shared * group, group);
        let image = image.expect("there is room");
        assert_eq!(image.tokens(), tokens);
        assert_eq!(image.shared_tokens(), shared * group);
        let mut away = Away {
            image,
            path: held.path,
            tokens: held.tokens,
        };
        settle(swap);
        assert_eq!(away.image.progress().phase, Phase::Out);
        self.cache.leave_after(&mut away.path, 0, Instant::now());
        away
    }

    /// Begins to bring it back behind the groups that are in memory. Returns how many bytes of pages it will take.
    fn begin_return(&mut self, away: &mut Away) -> u64 {
        let group = self.cache.grain().group_tokens().get();
        let (known, _) = self.cache.in_memory(Namespace::COMMON, &away.tokens);
        let groups = self.cache.rejoin(&mut away.path, &away.tokens);
        assert_eq!(groups, known);
        let bytes = away.image.bytes_to_return(groups * group);
        let pins = self.cache.pins_of(&away.path);
        assert_eq!(pins.len(), groups);
        away.image.begin_return(&pins, groups * group);
        bytes
    }
}

fn benches() -> impl Iterator<Item = Bench> {
    let rows = crate::pages::benches();
    rows.chain(crate::windows::benches())
        .chain(crate::states::benches())
}

/// Whatever became of its own groups meanwhile: all of them left, some, or none.
#[test]
fn what_others_have_stays_in_memory_and_is_gone_on_from_when_the_rest_is_back() {
    let evicted = [usize::MAX, 2, 0, usize::MAX];
    for (mut bench, evicted) in benches().zip(evicted.into_iter().cycle()) {
        let swap = swap(&bench);
        let donor = bench.run(&prompt(150, 40, 0));
        let alone = bench.owned();
        let mut held = bench.start(&prompt(150, 200, 1));
        bench.compute(&mut held, 20);
        let shared = bench.cache.shared_groups(&held.path);
        assert!(shared > 0 && shared < held.path.groups().len());
        let mut away = bench.send(&swap, held);
        assert!(away.path.groups().is_empty());
        let left = (0..evicted).take_while(|_| bench.cache.evict(Instant::now()));
        let left = left.count();
        let now = bench.cache.in_memory(Namespace::COMMON, &away.tokens);
        assert!(now.0 >= shared && now.1 == now.0 - shared);
        if evicted == usize::MAX {
            // Points of the one that runs may have gone too, but none of its pages.
            assert!(left > 0 && bench.owned() <= alone, "what left is free");
            assert_eq!(now.0, shared);
        }
        let before = bench.owned();
        let bytes = bench.begin_return(&mut away);
        settle(&swap);
        assert_eq!(away.image.progress().phase, Phase::Back);
        assert_eq!(bench.owned(), before + bytes, "no more than was said");
        assert_eq!(swap.status().read_bytes > 0, bytes > 0);
        let sequence = away.image.take().expect("it is back");
        drop(away.image);
        assert_eq!(swap.status().held.get(), 0);
        let mut held = Held {
            sequence,
            path: away.path,
            tokens: away.tokens,
        };
        bench.assert_rows(&held);
        held.tokens.extend(tokens(4, 90));
        bench.compute(&mut held, 7);
        bench.assert_rows(&held);
        bench.assert_rows(&donor);
        bench.leave(held);
        bench.leave(donor);
        while bench.cache.evict(Instant::now()) {}
        assert_eq!(bench.owned(), 0, "nothing is held twice");
    }
}

#[test]
fn one_that_turns_back_lets_go_of_the_groups_it_came_back_to_and_can_come_again() {
    for mut bench in benches().step_by(2) {
        let swap = swap(&bench);
        let donor = bench.run(&prompt(150, 40, 0));
        let mut held = bench.start(&prompt(150, 200, 1));
        bench.compute(&mut held, 20);
        let mut away = bench.send(&swap, held);
        for pieces in [0, 1, 3] {
            let before = bench.owned();
            let bytes = bench.begin_return(&mut away);
            for _ in 0..pieces {
                swap.advance();
            }
            let Phase::Returning { bytes_left } = away.image.progress().phase else {
                break;
            };
            assert_eq!(bench.owned() - before, bytes - bytes_left);
            assert!(away.image.retreat());
            bench.cache.leave_after(&mut away.path, 0, Instant::now());
            settle(&swap);
            assert_eq!(away.image.progress().phase, Phase::Out);
            assert_eq!(bench.owned(), before, "it has nothing again");
            // Of its own groups another one leaves each time, which is in the file too.
            bench.cache.evict(Instant::now());
        }
        if away.image.progress().phase == Phase::Out {
            while bench.cache.evict(Instant::now()) {}
            bench.begin_return(&mut away);
            settle(&swap);
        }
        assert!(!away.image.retreat(), "it is back");
        let mut held = Held {
            sequence: away.image.take().expect("it is back"),
            path: away.path,
            tokens: away.tokens,
        };
        held.tokens.extend(tokens(4, 30));
        bench.compute(&mut held, 7);
        bench.assert_rows(&held);
        bench.assert_rows(&donor);
    }
}

/// Pages of a file that somebody has cut read as zeros, which nobody may take for rows.
#[test]
fn rows_of_a_file_that_somebody_has_cut_are_not_moved_out() {
    guard::install().expect("a handler");
    let (bench, root) = (first_bench(), root());
    let mut first = bench.restarted(root.path());
    let prompt = first.turn(&tokens(0, LONG));
    first.settle();
    drop(first);
    let mut second = bench.restarted(root.path());
    assert!(second.restore(&prompt) > 0);
    let swap = swap(&second);
    let held = second.start(&prompt);
    let group = second.cache.grain().group_tokens().get();
    let image = swap.leave(held.sequence, 0, group).expect("there is room");
    let path = &segments(root.path())[0];
    let file = std::fs::OpenOptions::new().write(true).open(path);
    file.and_then(|file| file.set_len(5000)).expect("cut");
    settle(&swap);
    assert_eq!(image.progress().phase, Phase::Failed);
    assert!(image.look().sequence().is_none(), "it is lost");
    assert_eq!((swap.status().left, swap.status().short_of_memory), (0, 1));
    assert_eq!(swap.status().held.get(), 0);
}
