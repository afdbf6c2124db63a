//! The access log: a JSON object a line for every request, written by a thread of its own, so that no reply waits for a
//! disk.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

/// Lines that wait to be written at most.
const MOST_WAITING: usize = 4096;

/// Where a server writes what it was asked. Clones write to the same place; the last of them waits for what is still to
/// be written.
#[derive(Debug, Clone)]
pub struct AccessLog(Arc<Writer>);

#[derive(Debug)]
struct Writer {
    /// There until the end.
    lines: Option<SyncSender<String>>,
    /// Lines for which there was no room.
    lost: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Writer {
    fn drop(&mut self) {
        // Without it the thread would wait for more.
        self.lines = None;
        if let Some(thread) = self.thread.take() {
            thread.join().ok();
        }
    }
}

impl AccessLog {
    /// Appends to the file at `path`, which is made if there is none.
    ///
    /// # Errors
    /// [`io::Error`] when it cannot be opened, or there can be no thread.
    pub fn to_file(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Self::to(file)
    }

    /// Writes to standard error.
    ///
    /// # Errors
    /// [`io::Error`] when there can be no thread.
    pub fn to_standard_error() -> io::Result<Self> {
        Self::to(io::stderr())
    }

    fn to(mut place: impl Write + Send + 'static) -> io::Result<Self> {
        let (lines, written) = sync_channel::<String>(MOST_WAITING);
        let lost = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&lost);
        let write = move || {
            for line in written {
                let lost = counted.swap(0, Ordering::Relaxed);
                let told = match lost {
                    0 => String::new(),
                    _ => format!("{{\"lost_lines\":{lost}}}\n"),
                };
                // At once, so that lines of several writers do not mix.
                if place
                    .write_all(format!("{told}{line}\n").as_bytes())
                    .is_err()
                {
                    counted.fetch_add(lost + 1, Ordering::Relaxed);
                }
            }
        };
        let name = "lacuna-access-log".to_owned();
        let thread = thread::Builder::new().name(name).spawn(write)?;
        Ok(Self(Arc::new(Writer {
            lines: Some(lines),
            lost,
            thread: Some(thread),
        })))
    }

    /// Hands a line over. Where too many wait it is counted in its place.
    pub(crate) fn write(&self, line: String) {
        let lines = self.0.lines.as_ref();
        if lines.is_none_or(|lines| lines.try_send(line).is_err()) {
            self.0.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    /// Writes nothing until it is told to, and hands on what it writes.
    struct Slow {
        go: Receiver<()>,
        written: Sender<String>,
    }

    impl Write for Slow {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.go.recv().ok();
            let text = String::from_utf8(bytes.to_vec()).expect("lines are text");
            self.written.send(text).ok();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_without_room_are_counted_and_no_writer_waits() {
        let (start, go) = channel();
        let (written, lines) = channel();
        let log = AccessLog::to(Slow { go, written }).expect("a thread");
        // The first may be with the thread already, or not.
        for number in 0..MOST_WAITING + 3 {
            log.write(number.to_string());
        }
        let all: u64 = log.0.lost.load(Ordering::Relaxed);
        assert!((2..=3).contains(&all), "{all}");
        drop(start);
        drop(log);
        let text: String = lines.try_iter().collect();
        assert!(
            text.contains(&format!("{{\"lost_lines\":{all}}}\n")),
            "the loss is told"
        );
        let kept = text.lines().filter(|line| line.parse::<usize>().is_ok());
        assert_eq!(kept.count() as u64 + all, MOST_WAITING as u64 + 3);
    }
}
