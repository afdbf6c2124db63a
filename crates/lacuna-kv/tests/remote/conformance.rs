//! What every store does, whatever is behind it.

use std::io::{self, Read, Write};

use lacuna_kv::folder::remote::RemoteStore;

fn bytes(seed: u32, length: usize) -> Vec<u8> {
    let mut state = seed;
    let byte = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..length).map(byte).collect()
}

fn put(store: &dyn RemoteStore, name: &str, bytes: &[u8]) {
    let mut source = bytes;
    let put = store.put(name, bytes.len() as u64, &mut source);
    put.unwrap_or_else(|error| panic!("`{name}`: {error}"));
}

fn get(store: &dyn RemoteStore, name: &str) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    store.get(name, &mut bytes).map(|()| bytes)
}

fn lengths(store: &dyn RemoteStore, names: &[&str]) -> Vec<Option<u64>> {
    let names: Vec<String> = names.iter().map(|name| name.to_string()).collect();
    store.lengths(&names).expect("an answer")
}

/// Takes so many bytes, and then no more.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = self.0.checked_sub(bytes.len()).ok_or_else(full)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn full() -> io::Error {
    io::Error::new(io::ErrorKind::StorageFull, "no more")
}

/// A disk that fails after its bytes.
struct Broken<'a>(&'a [u8]);

impl Read for Broken<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.0.read(into)? {
            0 => Err(io::Error::new(io::ErrorKind::InvalidData, "broken")),
            read => Ok(read),
        }
    }
}

/// Panics where `store`, which is empty, does anything else than a store does.
pub(crate) fn check(store: &dyn RemoteStore) {
    let names = ["first/a.rows", "first/b.link", "second/a.rows"];
    assert_eq!(lengths(store, &names), [None; 3]);
    assert_eq!(lengths(store, &[]), []);
    let missing = get(store, names[0]).expect_err("nothing is there");
    assert_eq!(missing.kind(), io::ErrorKind::NotFound);

    // One byte, less than a part of an upload, a whole number of them, and some more.
    for (seed, length) in [1, 100_000, 16 << 20, (20 << 20) + 7]
        .into_iter()
        .enumerate()
    {
        let there = bytes(seed as u32, length);
        put(store, names[0], &there);
        assert_eq!(lengths(store, &names), [Some(length as u64), None, None]);
        assert!(get(store, names[0]).expect("there") == there);
    }
    put(store, names[2], b"other");
    assert_eq!(get(store, names[2]).expect("there"), b"other");
    assert_eq!(
        lengths(store, &names),
        [Some((20 << 20) + 7), None, Some(5)]
    );

    // Whoever takes no more has its own error back.
    let error = store.get(names[0], &mut Full(1 << 20)).expect_err("full");
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);

    // A source that fails or ends early makes no object, nor takes one away.
    let (short, there) = (bytes(9, 9 << 20), get(store, names[0]).expect("there"));
    for name in [names[0], names[1]] {
        let error = store.put(name, 10 << 20, &mut &short[..]);
        let error = error.expect_err("it ends early");
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let error = store.put(name, 10 << 20, &mut Broken(&short));
        let error = error.expect_err("it fails");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }
    assert_eq!(lengths(store, &names)[1], None);
    assert!(get(store, names[0]).expect("there") == there);

    // Several at once.
    std::thread::scope(|scope| {
        for thread in 0..4 {
            scope.spawn(move || {
                let name = format!("third/{thread}");
                for length in [10, 1000, 100_000] {
                    let bytes = bytes(thread, length);
                    put(store, &name, &bytes);
                    assert_eq!(get(store, &name).expect("there"), bytes);
                }
            });
        }
    });
}
