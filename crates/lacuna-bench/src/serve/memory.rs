//! A server's memory while requests run: what its sessions' pages come to, and what they should.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use lacuna_engine::Handle;
use serde::Serialize;
use serde_json::Value;

use super::client::Client;
use lacuna_cli::resident;

/// How often the server's memory is read.
const PERIOD: Duration = Duration::from_millis(50);

/// KV memory at the moment at which most of it was mapped.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Kv {
    pub(super) sessions: usize,
    /// Tokens in the sessions' caches, those they share counted for each.
    pub(super) tokens: u64,
    /// Tokens of whole page groups that all prompts begin with.
    pub(super) shared_tokens: u64,
    /// One copy of the shared tokens' rows in layers that keep all, and every session's own.
    pub(super) rows_bytes: u64,
    /// Pages that sessions map, each counted once.
    pub(super) mapped_bytes: u64,
    /// What is mapped beyond the rows, in pages per buffer and session.
    pub(super) excess_pages: f64,
    /// The most of that at any moment.
    pub(super) most_excess_pages: f64,
    /// Pages that only the prefix cache holds.
    pub(super) cached_bytes: u64,
    /// Pages nobody holds, kept for reuse.
    pub(super) idle_bytes: u64,
    pub(super) committed_bytes: u64,
    /// The kernel's word, where the server is in this process.
    pub(super) kernel: Option<Kernel>,
}

/// Committed KV memory by two accounts, of a moment between steps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Kernel {
    /// Blocks of the files behind the pages.
    pub(super) kernel_bytes: u64,
    pub(super) ledger_bytes: u64,
}

/// What was seen of a server's memory.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) peak_committed: Option<u64>,
    pub(super) kv: Option<Kv>,
    /// Pages copied because a shared one was written, at the first look and at the last.
    copies: Option<(u64, u64)>,
}

impl Seen {
    /// Pages copied meanwhile.
    pub(super) fn copied_pages(&self) -> Option<u64> {
        self.copies.map(|(first, last)| last - first)
    }

    fn note(&mut self, map: &Value, shared_tokens: usize, kernel: Option<Kernel>) -> Option<()> {
        let committed = number(map, "/ledger/committed_bytes")?;
        self.peak_committed = self.peak_committed.max(Some(committed));
        let copies = number(map, "/ledger/copies_on_write")?;
        self.copies = Some((self.copies.map_or(copies, |(first, _)| first), copies));
        let mut kv = Kv::of(map, shared_tokens, kernel)?;
        match &mut self.kv {
            None => self.kv = Some(kv),
            Some(most) => {
                kv.most_excess_pages = kv.most_excess_pages.max(most.most_excess_pages);
                most.most_excess_pages = kv.most_excess_pages;
                kv.kernel = kv.kernel.or(most.kernel);
                if (kv.sessions, kv.mapped_bytes) > (most.sessions, most.mapped_bytes) {
                    *most = kv;
                }
            }
        }
        Some(())
    }
}

/// Reads the server's accounts until told to end, and once more then, since all may be over before the second time;
/// nothing where there are none.
pub(super) fn watch(
    client: &Client,
    shared_tokens: usize,
    own: Option<&Handle>,
    running: &AtomicBool,
) -> Seen {
    let (mut seen, mut answered) = (Seen::default(), false);
    loop {
        let is_over = !running.load(Ordering::Relaxed);
        match client.get("/memory") {
            Ok(map) => {
                seen.note(&map, shared_tokens, own.and_then(Kernel::now));
                answered = true;
            }
            // Later ones are left out: the server is at work.
            Err(_) if answered => {}
            // It has no such map.
            Err(_) => return seen,
        }
        if is_over {
            return seen;
        }
        thread::sleep(PERIOD);
    }
}

impl Kernel {
    /// How often both are read until the ledger has not moved meanwhile: a step may map pages at any
    /// time, and takes several times as long as a reading.
    const READINGS: usize = 100;

    /// Reads both; nothing when the ledger moves all the time, or the kernel does not tell.
    fn now(engine: &Handle) -> Option<Self> {
        (0..Self::READINGS).find_map(|_| {
            let ledger_bytes = engine.ledger().committed.get();
            let kernel_bytes = resident::kv_blocks()?;
            (engine.ledger().committed.get() == ledger_bytes).then_some(Self {
                kernel_bytes,
                ledger_bytes,
            })
        })
    }
}

impl Kv {
    /// The accounts in `map`; nothing when there is no session.
    fn of(map: &Value, shared_tokens: usize, kernel: Option<Kernel>) -> Option<Self> {
        let group_tokens = number(map, "/pages/group_tokens")?;
        let kept_token_bytes = number(map, "/pages/kept_token_bytes")?;
        let page_bytes = number(map, "/pages/page_bytes")? * number(map, "/pages/buffers")?;
        let sessions = map["sessions"].as_array()?.iter();
        let of_each = |path: &str| -> Option<Vec<u64>> {
            let sessions = sessions.clone();
            sessions.map(|session| number(session, path)).collect()
        };
        let lengths = of_each("/cached_tokens")?;
        let shared = shared_tokens as u64 / group_tokens * group_tokens;
        let prefix = lengths.iter().map(|&length| length.min(shared)).max()?;
        let all: u64 = lengths.iter().map(|&length| length.min(shared)).sum();
        // Windows of sessions that have gone on from the same beginning have rows of their own.
        let again = (all - prefix) * kept_token_bytes;
        let rows_bytes = of_each("/rows_bytes")?
            .iter()
            .sum::<u64>()
            .saturating_sub(again);
        let state_bytes: u64 = of_each("/state_bytes")?.iter().sum();
        let mapped_bytes =
            number(map, "/ledger/unique_bytes")? + number(map, "/ledger/shared_bytes")?;
        let excess = mapped_bytes as f64 - (rows_bytes + state_bytes) as f64;
        let excess_pages = excess / (page_bytes * lengths.len() as u64) as f64;
        Some(Self {
            sessions: lengths.len(),
            tokens: lengths.iter().sum(),
            shared_tokens: shared,
            rows_bytes,
            mapped_bytes,
            excess_pages,
            most_excess_pages: excess_pages,
            cached_bytes: number(map, "/ledger/pinned_only_bytes")?,
            idle_bytes: number(map, "/ledger/idle_bytes")?,
            committed_bytes: number(map, "/ledger/committed_bytes")?,
            kernel,
        })
    }
}

fn number(value: &Value, path: &str) -> Option<u64> {
    value.pointer(path)?.as_u64()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn map(lengths: &[u64], unique: u64) -> Value {
        let sessions: Vec<Value> = lengths
            .iter()
            .map(|length| json!({"cached_tokens": length, "rows_bytes": length * 100, "state_bytes": 0}))
            .collect();
        json!({
            "pages": {"group_tokens": 16, "kept_token_bytes": 100, "page_bytes": 400, "buffers": 4},
            "ledger": {"committed_bytes": unique + 5000, "unique_bytes": unique, "shared_bytes": 3200,
                "pinned_only_bytes": 1600, "idle_bytes": 200, "copies_on_write": 3 + unique / 1600},
            "sessions": sessions,
        })
    }

    #[test]
    fn a_shared_beginning_counts_once_and_what_is_mapped_beyond_rows_is_excess() {
        let kv = Kv::of(&map(&[40, 33], 4800), 35, None).expect("sessions");
        assert_eq!((kv.shared_tokens, kv.tokens), (32, 73));
        assert_eq!(kv.rows_bytes, (32 + 8 + 1) * 100);
        assert_eq!(kv.mapped_bytes, 8000);
        assert_eq!(kv.excess_pages, 3900.0 / 3200.0);
        assert!(Kv::of(&map(&[], 0), 35, None).is_none());
    }

    #[test]
    fn the_fullest_moment_is_kept_and_the_largest_excess_of_any() {
        let mut seen = Seen::default();
        for (lengths, unique) in [(&[40, 33][..], 1600), (&[34], 3200), (&[41, 34], 3200)] {
            seen.note(&map(lengths, unique), 35, None).expect("whole");
        }
        let kv = seen.kv.expect("sessions");
        assert_eq!((kv.sessions, kv.tokens, kv.mapped_bytes), (2, 75, 6400));
        assert_eq!(kv.most_excess_pages, (6400.0 - 3400.0) / 1600.0);
        assert_eq!(seen.peak_committed, Some(8200));
        assert_eq!(seen.copied_pages(), Some(1));
    }
}
