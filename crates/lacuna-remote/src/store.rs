//! A store as threads use it: `opendal` behind it, on threads of its own, and no call that waits for ever.

use std::future::{Future, IntoFuture};
use std::io::{self, Read, Write};
use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt, stream};
use lacuna_kv::folder::remote::RemoteStore;
use opendal::{ErrorKind, Operator};
use tokio::runtime::{Builder, Runtime};

/// Objects of a service.
#[derive(Debug)]
pub(crate) struct ObjectStore {
    operator: Operator,
    place: String,
    runtime: Runtime,
}

/// How long an answer or the next bytes may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long the store may take with a part of what is written: it is on the store's disks then.
const PART_PATIENCE: Duration = Duration::from_secs(60);
/// What is written at once; 5 MiB is the least that S3 takes as a part.
const PART: usize = 8 << 20;
/// Where a service takes an object only whole, it is held in memory, and so a longer one is not written.
const MOST_HELD: u64 = 128 << 20;
/// Questions under way at once.
const QUESTIONS: usize = 32;
/// Characters of what a service says that are kept: some send a page.
const MOST_SAID: usize = 160;

impl ObjectStore {
    pub(crate) fn new(operator: Operator, place: String) -> io::Result<Self> {
        let mut runtime = Builder::new_multi_thread();
        // Bytes pass through them; checksums are compared, and files written, by those who ask.
        let runtime = runtime.worker_threads(2).thread_name("lacuna-remote");
        Ok(Self {
            operator,
            place,
            runtime: runtime.enable_all().build()?,
        })
    }

    async fn get_to(&self, name: &str, sink: &mut dyn Write) -> io::Result<()> {
        let reader = self.operator.reader(name);
        let reader = within(PATIENCE, reader).await?;
        let mut pieces = within(PATIENCE, reader.into_stream(..)).await?;
        while let Some(piece) = within(PATIENCE, pieces.try_next()).await? {
            for bytes in piece {
                sink.write_all(&bytes)?;
            }
        }
        Ok(())
    }

    async fn put_from(&self, name: &str, length: u64, source: &mut dyn Read) -> io::Result<()> {
        let in_parts = self.operator.info().capability().write_can_multi;
        if !in_parts && length > MOST_HELD {
            let said =
                "the store takes objects only whole, and this one is too long to be held in memory";
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, said));
        }
        if !in_parts || length <= PART as u64 {
            let bytes = take(source, length)?;
            let written = self.operator.write(name, bytes);
            return within(PART_PATIENCE, written).await.map(|_| ());
        }
        let writer = self.operator.writer_with(name).chunk(PART).into_future();
        let mut writer = within(PATIENCE, writer).await?;
        let mut left = length;
        let written = loop {
            if left == 0 {
                break within(PART_PATIENCE, writer.close()).await.map(|_| ());
            }
            let part = match take(source, left.min(PART as u64)) {
                Ok(part) => part,
                Err(error) => break Err(error),
            };
            left -= part.len() as u64;
            if let Err(error) = within(PART_PATIENCE, writer.write(part)).await {
                break Err(error);
            }
        };
        if written.is_err() {
            // Parts that stay cost their owner room; a service that cannot be reached forgets them in its own time.
            within(PATIENCE, writer.abort()).await.ok();
        }
        written
    }
}

/// The next `length` bytes of `source`.
fn take(source: &mut dyn Read, length: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(length as usize);
    source.take(length).read_to_end(&mut bytes)?;
    match bytes.len() as u64 == length {
        true => Ok(bytes),
        false => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// What the service answers, unless it takes too long.
async fn within<T>(
    patience: Duration,
    answer: impl Future<Output = Result<T, opendal::Error>>,
) -> io::Result<T> {
    match tokio::time::timeout(patience, answer).await {
        Ok(answer) => answer.map_err(|error| said(&error)),
        Err(_) => Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the store does not answer",
        )),
    }
}

/// What a service says, without where it was asked: addresses of some requests hold what they are signed with.
fn said(error: &opendal::Error) -> io::Error {
    let kind = match error.kind() {
        ErrorKind::NotFound => io::ErrorKind::NotFound,
        ErrorKind::PermissionDenied => io::ErrorKind::PermissionDenied,
        _ => io::ErrorKind::Other,
    };
    let message: String = error.message().chars().take(MOST_SAID).collect();
    io::Error::new(kind, format!("{}: {message}", error.kind()))
}

impl RemoteStore for ObjectStore {
    fn place(&self) -> String {
        self.place.clone()
    }

    fn can_write(&self) -> bool {
        self.operator.info().capability().write
    }

    fn lengths(&self, names: &[String]) -> io::Result<Vec<Option<u64>>> {
        let length = async |name: &String| match within(PATIENCE, self.operator.stat(name)).await {
            Ok(found) => Ok(Some(found.content_length())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        let lengths = stream::iter(names).map(length).buffered(QUESTIONS);
        self.runtime.block_on(lengths.try_collect())
    }

    fn get(&self, name: &str, sink: &mut dyn Write) -> io::Result<()> {
        self.runtime.block_on(self.get_to(name, sink))
    }

    fn put(&self, name: &str, length: u64, source: &mut dyn Read) -> io::Result<()> {
        self.runtime.block_on(self.put_from(name, length, source))
    }
}
