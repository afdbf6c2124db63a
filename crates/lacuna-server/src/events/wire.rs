//! As much of ZeroMQ's protocol as a server of events needs: ZMTP 3.0 over TCP, without encryption.
//!
//! Written here, because the crates for it keep a hundred thousand messages for each subscriber that does not read, take
//! frames of any length from anybody, and do not tell when somebody subscribes. Of a peer nothing is taken but what
//! is small: [`MOST_FRAME_BYTES`] and [`MOST_FRAMES`].

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// A frame of a peer: a subscription to a topic, a number to replay from, what the peer is.
const MOST_FRAME_BYTES: u64 = 1024;
/// Frames of a message: an empty one, and a number.
const MOST_FRAMES: usize = 4;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// What arrives.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Arrived {
    Message(Vec<Vec<u8>>),
    /// Its name and what is behind it.
    Command(Vec<u8>, Vec<u8>),
}

/// What a socket is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Publisher,
    Router,
}

impl Role {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Publisher => b"PUB",
            Self::Router => b"ROUTER",
        }
    }

    fn talks_to(self, peer: &[u8]) -> bool {
        match self {
            Self::Publisher => [&b"SUB"[..], b"XSUB"].contains(&peer),
            Self::Router => [&b"DEALER"[..], b"REQ", b"ROUTER"].contains(&peer),
        }
    }
}

/// Says what this end is, and finds out whether the other end is its like.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] when it is not, and what the connection says.
pub(super) async fn greet(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    role: Role,
) -> io::Result<()> {
    stream.write_all(&greeting()).await?;
    let mut theirs = [0; 64];
    stream.read_exact(&mut theirs).await?;
    let (major, mechanism) = (theirs[10], &theirs[12..32]);
    if theirs[0] != 0xFF || theirs[9] != 0x7F || major < 3 || mechanism != NO_SECURITY {
        return Err(wrong("not ZMTP 3 without encryption"));
    }
    stream.write_all(&ready(role)).await?;
    match read(stream).await? {
        Arrived::Command(name, properties) if name == b"READY" => {
            let peer = property(&properties, b"socket-type");
            let fits = peer.is_some_and(|peer| role.talks_to(peer));
            fits.then_some(())
                .ok_or_else(|| wrong("another kind of socket"))
        }
        _ => Err(wrong("READY comes first")),
    }
}

/// The mechanism of connections that are neither encrypted nor authenticated.
const NO_SECURITY: &[u8; 20] = b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";

fn greeting() -> [u8; 64] {
    let mut greeting = [0; 64];
    (greeting[0], greeting[8], greeting[9]) = (0xFF, 1, 0x7F);
    // Version 3.0, in which subscriptions are messages.
    greeting[10] = 3;
    greeting[12..32].copy_from_slice(NO_SECURITY);
    greeting
}

fn ready(role: Role) -> Vec<u8> {
    let mut body = b"\x05READY\x0bSocket-Type".to_vec();
    body.extend((role.name().len() as u32).to_be_bytes());
    body.extend(role.name());
    let mut bytes = Vec::new();
    frame(&mut bytes, COMMAND, &body);
    bytes
}

/// The value of a property, whose names are the same in capitals and in small letters.
fn property<'a>(mut properties: &'a [u8], wanted: &[u8]) -> Option<&'a [u8]> {
    loop {
        let (&length, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(usize::from(length))?;
        let (length, rest) = rest.split_first_chunk::<4>()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
        if name.eq_ignore_ascii_case(wanted) {
            return Some(value);
        }
        properties = rest;
    }
}

/// A message of `parts`, which are not none.
pub(super) fn message(parts: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(parts.iter().map(|part| part.len() + 9).sum());
    for (index, part) in parts.iter().enumerate() {
        let more = if index + 1 < parts.len() { MORE } else { 0 };
        frame(&mut bytes, more, part);
    }
    bytes
}

/// The answer to a peer that asks whether this end is there, with what came along.
pub(super) fn pong(context: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame(&mut bytes, COMMAND, &[b"\x04PONG", context].concat());
    bytes
}

fn frame(bytes: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(length) => bytes.extend([flags, length]),
        Err(_) => {
            bytes.push(flags | LONG);
            bytes.extend((body.len() as u64).to_be_bytes());
        }
    }
    bytes.extend(body);
}

/// The next message or command.
///
/// # Errors
/// [`io::ErrorKind::InvalidData`] when it is none, or more than a peer has to say.
pub(super) async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<Arrived> {
    let mut frames = Vec::new();
    loop {
        let flags = stream.read_u8().await?;
        if flags & !(MORE | LONG | COMMAND) != 0 {
            return Err(wrong("flags that are none"));
        }
        let length = match flags & LONG {
            0 => u64::from(stream.read_u8().await?),
            _ => stream.read_u64().await?,
        };
        if length > MOST_FRAME_BYTES || frames.len() == MOST_FRAMES {
            return Err(wrong("more than a peer has to say"));
        }
        let mut body = vec![0; length as usize];
        stream.read_exact(&mut body).await?;
        if flags & COMMAND != 0 {
            let command = body.split_first().and_then(|(&length, rest)| {
                let (name, rest) = rest.split_at_checked(usize::from(length))?;
                Some(Arrived::Command(name.to_vec(), rest.to_vec()))
            });
            return command.ok_or_else(|| wrong("a command without a name"));
        }
        frames.push(body);
        if flags & MORE == 0 {
            return Ok(Arrived::Message(frames));
        }
    }
}

fn wrong(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.expect("a runtime").block_on(future)
    }

    #[test]
    fn what_is_written_is_read() {
        let long = vec![7; 300];
        for parts in [
            vec![&b"one"[..]],
            vec![b"", b"topic", &long],
            vec![b"", b""],
        ] {
            let mut bytes = &message(&parts)[..];
            let read = block_on(read(&mut bytes)).expect("a message");
            let parts = parts.iter().map(|part| part.to_vec());
            assert_eq!(read, Arrived::Message(parts.collect()));
            assert!(bytes.is_empty());
        }
        let answer = pong(b"context");
        let command = Arrived::Command(b"PONG".to_vec(), b"context".to_vec());
        assert_eq!(
            block_on(read(&mut &answer[..])).expect("a command"),
            command
        );
    }

    #[test]
    fn more_than_a_peer_has_to_say_is_refused_before_there_is_memory_for_it() {
        let huge = [[LONG].as_slice(), &u64::MAX.to_be_bytes()].concat();
        let many = message(&[&b"a"[..]; MOST_FRAMES + 1]);
        for bytes in [
            huge,
            many,
            vec![0x80, 0],
            vec![COMMAND, 1, 9],
            vec![COMMAND, 0],
        ] {
            let refused = block_on(read(&mut &bytes[..])).expect_err("no message");
            assert_eq!(refused.kind(), io::ErrorKind::InvalidData, "{bytes:?}");
        }
    }

    #[test]
    fn only_sockets_that_fit_are_greeted() {
        let greeted = |role, bytes: Vec<u8>| {
            let (mut ours, mut theirs) = tokio::io::duplex(4096);
            block_on(async {
                theirs.write_all(&bytes).await.expect("room");
                drop(theirs.shutdown().await);
                greet(&mut ours, role).await
            })
        };
        let peer = |kind: &[u8]| {
            let mut body = b"\x05READY\x08Identity\0\0\0\0\x0bsocket-type".to_vec();
            body.extend((kind.len() as u32).to_be_bytes());
            body.extend(kind);
            let mut bytes = greeting().to_vec();
            frame(&mut bytes, COMMAND, &body);
            bytes
        };
        for (role, kind) in [
            (Role::Publisher, &b"SUB"[..]),
            (Role::Publisher, b"XSUB"),
            (Role::Router, b"DEALER"),
            (Role::Router, b"REQ"),
        ] {
            assert!(greeted(role, peer(kind)).is_ok(), "{kind:?}");
        }
        assert!(greeted(Role::Publisher, peer(b"DEALER")).is_err());
        assert!(greeted(Role::Router, peer(b"SUB")).is_err());
        assert!(greeted(Role::Router, b"GET / HTTP/1.1\r\n\r\n".repeat(5)).is_err());
        assert!(
            greeted(Role::Router, greeting().to_vec()).is_err(),
            "it went away"
        );
        let mut encrypted = peer(b"SUB");
        encrypted[12..17].copy_from_slice(b"CURVE");
        assert!(greeted(Role::Publisher, encrypted).is_err());
    }

    proptest! {
        #[test]
        fn whatever_arrives_ends_in_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut rest = &bytes[..];
            while block_on(read(&mut rest)).is_ok() {}
            property(&bytes, b"socket-type");
        }
    }
}
