//! The access log: a JSON object a line for every request, written by a thread of its own, so that no reply waits for a
//! disk.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
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
    /// The file, if it is one that can be opened again.
    path: Option<PathBuf>,
    /// There until the end.
    lines: Option<SyncSender<Message>>,
    /// Lines for which there was no room.
    lost: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread is told.
enum Message {
    Line(String),
    /// To write there from now on.
    Place(File),
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
        let file = open(path)?;
        Self::to(file, Some(path.to_owned()))
    }

    /// Writes to standard error.
    ///
    /// # Errors
    /// [`io::Error`] when there can be no thread.
    pub fn to_standard_error() -> io::Result<Self> {
        Self::to(io::stderr(), None)
    }

    /// Opens the file again, or makes it anew: who keeps logs has renamed it. Lines that were handed over before are
    /// still written to the old one.
    ///
    /// # Errors
    /// [`io::Error`] when it cannot be opened; the old one stays in use.
    pub fn reopen(&self) -> io::Result<()> {
        let (Some(path), Some(lines)) = (&self.0.path, &self.0.lines) else {
            return Ok(());
        };
        let file = open(path)?;
        // The thread ends after the last of these.
        lines.send(Message::Place(file)).ok();
        Ok(())
    }

    fn to(place: impl Write + Send + 'static, path: Option<PathBuf>) -> io::Result<Self> {
        let (lines, written) = sync_channel::<Message>(MOST_WAITING);
        let mut place: Box<dyn Write + Send> = Box::new(place);
        let lost = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&lost);
        let write = move || {
            for message in written {
                let line = match message {
                    Message::Line(line) => line,
                    Message::Place(file) => {
                        place = Box::new(file);
                        continue;
                    }
                };
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
            path,
            lines: Some(lines),
            lost,
            thread: Some(thread),
        })))
    }

    /// Hands a line over. Where too many wait it is counted in its place.
    pub(crate) fn write(&self, line: String) {
        let lines = self.0.lines.as_ref();
        if lines.is_none_or(|lines| lines.try_send(Message::Line(line)).is_err()) {
            self.0.lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
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
    fn a_log_that_was_renamed_goes_on_under_its_name() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |name: &str| folder.path().join(name);
        let log = AccessLog::to_file(&path("log")).expect("a file");
        log.write("one".to_owned());
        std::fs::rename(path("log"), path("log.1")).expect("renamed");
        log.write("two".to_owned());
        log.reopen().expect("opened again");
        log.write("three".to_owned());
        drop(log);
        let text = |name: &str| std::fs::read_to_string(path(name)).expect("text");
        assert_eq!(
            (text("log.1").as_str(), text("log").as_str()),
            ("one\ntwo\n", "three\n")
        );
    }

    #[test]
    fn lines_without_room_are_counted_and_no_writer_waits() {
        let (start, go) = channel();
        let (written, lines) = channel();
        let log = AccessLog::to(Slow { go, written }, None).expect("a thread");
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
