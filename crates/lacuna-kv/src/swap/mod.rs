//! The swap file: pages of sequences that have to make room, and come back at the same addresses.
//!
//! The file has no name and ends with the process. A thread moves a sequence a piece at a time, a mebibyte or a page,
//! through memory of its own: a disk that stalls holds no page of the pool, because those are taken back
//! ([`Swapped`]) without waiting for it. It moves out from the last rows to the first, so that what others may have
//! comes free as it goes.
//!
//! ```text
//!            all written                begin_return              all read
//! leaving ---------------> out ------------------------> returning --------> back
//!    |                      ^ |                             |  |
//!    |  the file fails      | +--- retreat (memory short) <-+  | the file or memory fails
//!    +----------------------|----------------------------------+----------> failed
//! ```
//!
//! * **W1** Pages are given back only once their bytes are in the file, and a piece has its checksum from then on.
//! * **W2** No byte of the file is in a sequence before the checksum of its piece was compared. One that fails loses
//!   the whole sequence, which is computed again: never an answer.
//! * **W3** A place in the file belongs to one sequence, from when it begins to leave until it is back or gone.

mod file;
mod image;
mod room;

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lacuna_pages::ByteLength;

use crate::cache::KvCache;
use file::{Aligned, TemporaryFile};
pub use file::{SwapDevice, SwapFileError};
use image::Image;
pub use image::{Look, Phase, Progress, Swapped};
pub use room::SwapRoom;

/// Where a swap file is, and how large it may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwapConfig {
    /// The folder whose file system it is on. It has no name there.
    pub folder: PathBuf,
    /// Bytes that it may hold.
    pub limit: ByteLength,
}

/// Why there is no swap file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SwapError {
    /// The file cannot be.
    #[error("no swap file can be made in `{}`: {source}; set TMPDIR to a folder on a disk, or leave swapping out", folder.display())]
    File {
        /// The folder.
        folder: PathBuf,
        /// What is in the way.
        source: SwapFileError,
    },
    /// Pages do not come and go one by one.
    #[error("KV memory held as `{policy}` cannot be swapped; use the policy `sparse`")]
    Policy {
        /// How memory is held.
        policy: String,
    },
    /// The system gives no thread.
    #[error("no thread can be started for swapping: {0}")]
    Thread(io::Error),
}

/// How fast something has gone lately.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    amount: f64,
    seconds: f64,
    /// What was longer ago than this much counts less and less.
    window: f64,
}

impl Rate {
    /// Nothing seen yet, and the last `window` of it to count.
    #[must_use]
    pub fn over(window: f64) -> Self {
        Self {
            amount: 0.0,
            seconds: 0.0,
            window,
        }
    }

    /// Takes note that `amount` took `time`.
    pub fn observe(&mut self, amount: f64, time: Duration) {
        self.amount += amount;
        self.seconds += time.as_secs_f64();
        if self.amount > self.window {
            self.seconds *= self.window / self.amount;
            self.amount = self.window;
        }
    }

    /// How much goes in a second; `None` when nothing has been seen.
    #[must_use]
    pub fn per_second(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.amount / self.seconds)
    }
}

/// A swap file at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct SwapStatus {
    /// Bytes that the file may hold.
    pub limit: ByteLength,
    /// Bytes of it that belong to sequences.
    pub held: ByteLength,
    /// Sequences whose pages were moved out, all of them.
    pub left: u64,
    /// Sequences that came back.
    pub returned: u64,
    /// Bytes written since the start.
    pub written_bytes: u64,
    /// Bytes read since the start.
    pub read_bytes: u64,
    /// Sequences lost because the file could not be written.
    pub failed_writes: u64,
    /// Sequences lost because the file could not be read, or held something else.
    pub failed_reads: u64,
    /// Sequences lost because there was no memory for them when they came back, or the device failed.
    pub short_of_memory: u64,
    /// What the system said to the last write or read that failed.
    pub failure: Option<String>,
    /// Bytes written in a second, as seen lately.
    pub write_rate: Rate,
    /// Bytes read in a second, as seen lately.
    pub read_rate: Rate,
}

/// Bytes in which a swap file is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwapSizes {
    /// What it may hold.
    pub limit: ByteLength,
    /// What is moved at once, rounded up to pages.
    pub piece: ByteLength,
    /// What comes free together.
    pub block: ByteLength,
}

impl SwapSizes {
    /// Pieces that are enough for a disk to be as fast as it is and little enough to hold beside; blocks in which a
    /// run of pages of each of many buffers is still as long as mappings should be.
    fn of_files(limit: ByteLength) -> Self {
        Self {
            limit,
            piece: ByteLength::mebibytes(1),
            block: ByteLength::mebibytes(64),
        }
    }
}

/// A swap file in use.
#[derive(Debug)]
pub struct Swap {
    shared: Arc<Shared>,
    worker: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    device: Box<dyn SwapDevice>,
    /// Bytes of a place in the file: what is written, read and checked at once.
    piece_bytes: usize,
    block_bytes: usize,
    room: Arc<SwapRoom>,
    places: Mutex<Places>,
    /// Taken before `places`.
    queue: Mutex<Queue>,
    changed: Condvar,
    status: Mutex<SwapStatus>,
}

/// Which places of the file nobody has.
#[derive(Debug, Default)]
struct Places {
    /// Those before `unused` that came free. The first are taken first, so that a sequence lies in long runs.
    free: BTreeSet<u32>,
    /// From here on none is taken.
    unused: u32,
    /// From here on nothing is in the file.
    written: u32,
}

#[derive(Debug, Default)]
struct Queue {
    images: VecDeque<Arc<Mutex<Image>>>,
    busy: bool,
    closing: bool,
}

/// What moving a piece came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moved {
    Out(usize),
    In(usize),
    /// There is nothing more to be moved.
    Nothing,
}

impl Swap {
    /// Bytes that rates are over: the last second or so of most disks.
    const RATE_WINDOW: f64 = (1u64 << 30) as f64;
    /// Written and read before anything is swapped, so that rates are known: some milliseconds.
    const PROBE_PIECES: u32 = 16;
    /// How long a thread is waited for that may be held by a disk.
    const CLOSING: Duration = Duration::from_secs(1);

    /// Makes the file and a thread that moves pages of sequences of `cache`.
    ///
    /// # Errors
    /// [`SwapError`].
    pub fn open(config: &SwapConfig, cache: &KvCache) -> Result<Self, SwapError> {
        let refused = |source| SwapError::File {
            folder: config.folder.clone(),
            source,
        };
        let file = TemporaryFile::create(&config.folder).map_err(refused)?;
        let sizes = SwapSizes::of_files(config.limit);
        let mut swap = Self::over(Box::new(file), sizes, cache)?;
        let probed = swap.probe();
        probed.map_err(|source| refused(SwapFileError::Io(source)))?;
        swap.start().map_err(SwapError::Thread)?;
        Ok(swap)
    }

    /// Starts the thread.
    fn start(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name("lacuna-swap".to_owned());
        self.worker = Some(thread.spawn(move || shared.run())?);
        Ok(())
    }

    /// One over any device, without a thread: [`Swap::advance`] moves what is to be moved, and rates are what they
    /// are said to be.
    ///
    /// # Errors
    /// [`SwapError::Policy`].
    pub fn over(
        device: Box<dyn SwapDevice>,
        sizes: SwapSizes,
        cache: &KvCache,
    ) -> Result<Self, SwapError> {
        let policy = cache.policy();
        if !matches!(policy, crate::policy::KvPolicy::Sparse(_)) {
            let policy = policy.to_string();
            return Err(SwapError::Policy { policy });
        }
        let piece_bytes = sizes.piece.get().max(1);
        let piece_bytes = piece_bytes.next_multiple_of(cache.page_size().bytes());
        // Places are numbers of four bytes.
        let limit = sizes.limit.get().min(u64::from(u32::MAX) * piece_bytes);
        Ok(Self {
            shared: Arc::new(Shared {
                device,
                piece_bytes: piece_bytes as usize,
                block_bytes: sizes.block.get() as usize,
                room: Arc::new(SwapRoom::new(limit)),
                places: Mutex::default(),
                queue: Mutex::default(),
                changed: Condvar::new(),
                status: Mutex::new(SwapStatus {
                    limit: sizes.limit,
                    held: ByteLength::new(0),
                    left: 0,
                    returned: 0,
                    written_bytes: 0,
                    read_bytes: 0,
                    failed_writes: 0,
                    failed_reads: 0,
                    short_of_memory: 0,
                    failure: None,
                    write_rate: Rate::over(Self::RATE_WINDOW),
                    read_rate: Rate::over(Self::RATE_WINDOW),
                }),
            }),
            worker: None,
        })
    }

    /// Writes and reads some pieces, to know how fast that goes.
    fn probe(&self) -> io::Result<()> {
        let shared = &self.shared;
        let mut memory = Aligned::new(shared.piece_bytes);
        // Not zeros: some disks do not write those.
        for (index, byte) in memory.bytes_mut().iter_mut().enumerate() {
            *byte = index as u8;
        }
        let places = shared.room.limit() / shared.piece_bytes as u64;
        let pieces = Self::PROBE_PIECES.min(places as u32);
        let bytes = shared.piece_bytes as f64;
        for piece in 0..pieces {
            let started = Instant::now();
            shared.device.write(shared.offset(piece), memory.bytes())?;
            shared.status().write_rate.observe(bytes, started.elapsed());
        }
        for piece in 0..pieces {
            let started = Instant::now();
            shared
                .device
                .read(shared.offset(piece), memory.bytes_mut())?;
            shared.status().read_rate.observe(bytes, started.elapsed());
        }
        shared.device.discard_from(0);
        Ok(())
    }

    /// What the file and whatever is put aside beside it may hold together.
    #[must_use]
    pub fn room(&self) -> Arc<SwapRoom> {
        Arc::clone(&self.shared.room)
    }

    /// Says how fast the file is, where there is no thread to find out.
    pub fn assume_rates(&self, bytes: f64, time: Duration) {
        let mut status = self.shared.status();
        status.write_rate.observe(bytes, time);
        status.read_rate.observe(bytes, time);
    }

    /// Moves a piece of what is to be moved. Returns whether there was one.
    pub fn advance(&self) -> bool {
        let next = self.shared.queue().images.front().cloned();
        if self.shared.shrinks() {
            self.shared.shrink();
        }
        let Some(image) = next else {
            return false;
        };
        let mut memory = Aligned::new(self.shared.piece_bytes);
        if self.shared.advance(&image, &mut memory) == Moved::Nothing {
            self.shared.queue().images.pop_front();
        }
        true
    }

    /// What it holds, and what became of it.
    #[must_use]
    pub fn status(&self) -> SwapStatus {
        let held = self.shared.places().taken() * self.shared.piece_bytes as u64;
        SwapStatus {
            held: ByteLength::new(held),
            ..self.shared.status().clone()
        }
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let Some(worker) = self.worker.take() else {
            return;
        };
        let mut queue = self.shared.queue();
        queue.closing = true;
        queue.images.clear();
        self.shared.changed.notify_all();
        let busy = |queue: &mut Queue| queue.busy;
        let waited = self
            .shared
            .changed
            .wait_timeout_while(queue, Self::CLOSING, busy);
        let (queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let held = queue.busy;
        drop(queue);
        // A thread that a disk holds ends with the process.
        if !held {
            worker.join().ok();
        }
    }
}

impl Shared {
    /// The thread.
    fn run(&self) {
        let mut memory = Aligned::new(self.piece_bytes);
        while let Some(image) = self.next() {
            loop {
                let started = Instant::now();
                let moved = self.advance(&image, &mut memory);
                let time = started.elapsed();
                let mut status = self.status();
                match moved {
                    Moved::Out(bytes) => status.write_rate.observe(bytes as f64, time),
                    Moved::In(bytes) => status.read_rate.observe(bytes as f64, time),
                    Moved::Nothing => break,
                }
            }
            self.queue().busy = false;
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<Arc<Mutex<Image>>> {
        let mut queue = self.queue();
        loop {
            if queue.closing {
                return None;
            }
            if let Some(image) = queue.images.pop_front() {
                queue.busy = true;
                return Some(image);
            }
            if self.shrinks() {
                drop(queue);
                self.shrink();
                queue = self.queue();
                continue;
            }
            let waited = self.changed.wait(queue);
            queue = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn enqueue(&self, image: Arc<Mutex<Image>>) {
        self.queue().images.push_back(image);
        self.changed.notify_all();
    }

    /// Takes `count` places; `None` when there is no room for as many.
    fn take(&self, count: usize) -> Option<Vec<u32>> {
        let bytes = (count * self.piece_bytes) as u64;
        let fits = self.room.try_take(bytes);
        fits.then(|| self.places().take(count))
    }

    fn give_back(&self, places: impl IntoIterator<Item = u32>) {
        let places: Vec<u32> = places.into_iter().collect();
        self.room
            .give_back((places.len() * self.piece_bytes) as u64);
        self.places().give_back(places);
        self.changed.notify_all();
    }

    fn note_used(&self, place: u32) {
        let mut places = self.places();
        places.written = places.written.max(place + 1);
    }

    fn shrinks(&self) -> bool {
        let places = self.places();
        places.unused < places.written
    }

    /// Gives the end of the file back to the disk. Only the thread that writes does it.
    fn shrink(&self) {
        let unused = {
            let mut places = self.places();
            places.written = places.unused;
            places.unused
        };
        self.device.discard_from(self.offset(unused));
    }

    fn offset(&self, place: u32) -> u64 {
        u64::from(place) * self.piece_bytes as u64
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        locked(&self.places)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        locked(&self.queue)
    }

    fn status(&self) -> MutexGuard<'_, SwapStatus> {
        locked(&self.status)
    }
}

impl Places {
    /// Takes `count` places.
    fn take(&mut self, count: usize) -> Vec<u32> {
        let mut taken = Vec::with_capacity(count);
        while taken.len() < count {
            let place = self.free.pop_first().unwrap_or_else(|| {
                self.unused += 1;
                self.unused - 1
            });
            taken.push(place);
        }
        taken
    }

    fn give_back(&mut self, places: impl IntoIterator<Item = u32>) {
        self.free.extend(places);
        // Those at the end are as if they had never been taken.
        while self.unused > 0 && self.free.last() == Some(&(self.unused - 1)) {
            self.free.pop_last();
            self.unused -= 1;
        }
    }

    fn taken(&self) -> u64 {
        u64::from(self.unused) - self.free.len() as u64
    }
}

/// What a mutex guards here is changed in steps that do not panic.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::ElementType;

    use super::*;
    use crate::{Geometry, KvElements, KvPolicy};

    /// A disk that nothing is in.
    #[derive(Debug)]
    struct Empty {
        _held: Arc<()>,
    }

    impl SwapDevice for Empty {
        fn write(&self, _offset: u64, _bytes: &[u8]) -> io::Result<()> {
            Ok(())
        }

        fn read(&self, _offset: u64, _bytes: &mut [u8]) -> io::Result<()> {
            Ok(())
        }

        fn discard_from(&self, _offset: u64) {}
    }

    #[test]
    fn the_thread_ends_with_the_file() {
        let held = Arc::new(());
        let disk = Box::new(Empty {
            _held: Arc::clone(&held),
        });
        let geometry = Geometry::uniform(1, 1, 64, KvElements::both(ElementType::F16));
        let cache = KvCache::new(geometry, KvPolicy::default()).expect("the system has pages");
        let limit = ByteLength::new(1 << 40);
        let sizes = SwapSizes::of_files(limit);
        let mut swap = Swap::over(disk, sizes, &cache).expect("it can be swapped");
        assert_eq!(swap.room().limit(), 1 << 40);
        swap.start().expect("a thread");
        assert_eq!(Arc::strong_count(&held), 2);
        drop(swap);
        assert_eq!(Arc::strong_count(&held), 1, "nobody has the disk");
    }

    #[test]
    fn places_are_taken_from_the_front() {
        let mut places = Places::default();
        assert_eq!(places.take(3), [0, 1, 2]);
        assert_eq!(places.taken(), 3);
        places.give_back([1]);
        assert_eq!(places.take(3), [1, 3, 4]);
        places.give_back([0, 3, 4, 1]);
        assert_eq!((places.taken(), places.unused), (1, 3));
        places.give_back([2]);
        assert_eq!((places.taken(), places.unused), (0, 0));
    }

    #[test]
    fn a_rate_follows_what_was_seen_last() {
        let mut rate = Rate::over(100.0);
        assert_eq!(rate.per_second(), None);
        rate.observe(100.0, Duration::from_secs(1));
        assert_eq!(rate.per_second(), Some(100.0));
        for _ in 0..20 {
            rate.observe(100.0, Duration::from_secs(4));
        }
        let slower = rate.per_second().expect("it was seen");
        assert!((24.9..25.1).contains(&slower), "{slower}");
    }
}
