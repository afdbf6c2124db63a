//! Objects in memory, in a store that fails, stalls, cuts and lies as it is told: for tests of what stands on one.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::RemoteStore;

/// What a store does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum StoreTrouble {
    /// What it is asked.
    #[default]
    Nothing,
    /// Nothing: every call fails.
    Refuses,
    /// It answers what is there, and fails in the middle of an object, both ways.
    Breaks,
    /// It gives half of an object for all of it.
    Cuts,
    /// It gives objects with one bit that differs.
    Lies,
    /// It gives every object more bytes than it has.
    Pads,
    /// It says of every object that it is there, of a length that none has.
    Invents,
    /// Nothing for now: calls wait until it does something else.
    Stalls,
}

/// Objects in memory. Clones are the same store.
#[derive(Clone, Debug, Default)]
pub struct MemoryStore(Arc<(Mutex<Held>, Condvar)>);

#[derive(Debug, Default)]
struct Held {
    objects: BTreeMap<String, Vec<u8>>,
    trouble: StoreTrouble,
    /// Objects whose length was asked for.
    asked: u64,
}

impl MemoryStore {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the store does from now on.
    pub fn set(&self, trouble: StoreTrouble) {
        self.held().trouble = trouble;
        self.0.1.notify_all();
    }

    /// The names of all objects.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        self.held().objects.keys().cloned().collect()
    }

    /// The bytes of an object.
    #[must_use]
    pub fn object(&self, name: &str) -> Option<Vec<u8>> {
        self.held().objects.get(name).cloned()
    }

    /// Puts an object there, whatever the store does; without bytes, takes it away.
    pub fn set_object(&self, name: &str, bytes: Option<Vec<u8>>) {
        let mut held = self.held();
        match bytes {
            Some(bytes) => held.objects.insert(name.to_owned(), bytes),
            None => held.objects.remove(name),
        };
    }

    /// How many objects' lengths were asked for.
    #[must_use]
    pub fn asked(&self) -> u64 {
        self.held().asked
    }

    /// What it holds and does, once it does something.
    fn answer(&self) -> io::Result<MutexGuard<'_, Held>> {
        let stalls = |held: &mut Held| held.trouble == StoreTrouble::Stalls;
        let waited = self.0.1.wait_while(self.held(), stalls);
        let held = waited.unwrap_or_else(PoisonError::into_inner);
        match held.trouble {
            StoreTrouble::Refuses => Err(broken()),
            _ => Ok(held),
        }
    }
}

fn broken() -> io::Error {
    io::Error::other("injected")
}

impl RemoteStore for MemoryStore {
    fn place(&self) -> String {
        "memory".to_owned()
    }

    fn can_write(&self) -> bool {
        true
    }

    fn lengths(&self, names: &[String]) -> io::Result<Vec<Option<u64>>> {
        let mut held = self.answer()?;
        held.asked += names.len() as u64;
        let length = |name: &String| match held.trouble {
            StoreTrouble::Invents => Some(1),
            _ => held.objects.get(name).map(|bytes| bytes.len() as u64),
        };
        Ok(names.iter().map(length).collect())
    }

    fn get(&self, name: &str, sink: &mut dyn Write) -> io::Result<()> {
        let held = self.answer()?;
        let bytes = held.objects.get(name).cloned();
        let (mut bytes, trouble) = (bytes.ok_or(io::ErrorKind::NotFound)?, held.trouble);
        drop(held);
        let half = bytes.len() / 2;
        match trouble {
            StoreTrouble::Breaks | StoreTrouble::Cuts => bytes.truncate(half),
            StoreTrouble::Lies if half > 0 => bytes[half] ^= 1,
            StoreTrouble::Pads => bytes.push(0),
            _ => {}
        }
        // In pieces, as from a network.
        for piece in bytes.chunks(10_000) {
            sink.write_all(piece)?;
            drop(self.answer()?);
        }
        match trouble {
            StoreTrouble::Breaks => Err(broken()),
            _ => Ok(()),
        }
    }

    fn put(&self, name: &str, length: u64, source: &mut dyn Read) -> io::Result<()> {
        drop(self.answer()?);
        let mut bytes = Vec::new();
        source.take(length).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut held = self.answer()?;
        if held.trouble == StoreTrouble::Breaks {
            return Err(broken());
        }
        held.objects.insert(name.to_owned(), bytes);
        Ok(())
    }
}
