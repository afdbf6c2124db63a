//! KV events, as a router takes them: over ZeroMQ's protocol, spoken here byte by byte.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use lacuna_server::{ApiKeys, KvEventsConfig, Server, StartError};
use serde_json::{Value, json};

use crate::support::{
    COMPLETION, assert_nothing_held, at_rest, config, connect_to, model, posted, start_with, until,
};

const ANY_PORT: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

fn events() -> KvEventsConfig {
    KvEventsConfig {
        address: ANY_PORT,
        topic: "kv@one@demo".to_owned(),
        replay: Some(ANY_PORT),
    }
}

fn telling() -> Server {
    start_with(|config| config.kv_events = Some(events()))
}

/// A socket of ZeroMQ's that has greeted the other end.
struct Socket(TcpStream);

impl Socket {
    fn greet(address: SocketAddr, kind: &str) -> Self {
        let mut socket = Self(connect_to(address));
        let mut greeting = [0; 64];
        (greeting[0], greeting[9], greeting[10]) = (0xFF, 0x7F, 3);
        greeting[12..16].copy_from_slice(b"NULL");
        socket.0.write_all(&greeting).expect("sent");
        socket.0.read_exact(&mut greeting).expect("a greeting");
        let length = (kind.len() as u32).to_be_bytes();
        let ready = [b"\x05READY\x0bSocket-Type", &length[..], kind.as_bytes()].concat();
        socket.frame(4, &ready);
        let ready = socket.frames().expect("READY");
        assert!(ready[0].starts_with(b"\x05READY"));
        socket
    }

    fn frame(&mut self, flags: u8, body: &[u8]) {
        let head = [flags, u8::try_from(body.len()).expect("short")];
        self.0.write_all(&[&head, body].concat()).expect("sent");
    }

    fn subscriber(address: SocketAddr, topic: &str) -> Self {
        let mut socket = Self::greet(address, "SUB");
        socket.frame(0, &[b"\x01", topic.as_bytes()].concat());
        socket
    }

    /// Those of the next message; `None` at the end.
    fn frames(&mut self) -> Option<Vec<Vec<u8>>> {
        let mut frames = Vec::new();
        loop {
            let mut flags = [0; 2];
            self.0.read_exact(&mut flags).ok()?;
            let [flags, short] = flags;
            let length = match flags & 2 {
                0 => u64::from(short),
                _ => {
                    let mut rest = [0; 7];
                    self.0.read_exact(&mut rest).ok()?;
                    let [a, b, c, d, e, f, g] = rest;
                    u64::from_be_bytes([short, a, b, c, d, e, f, g])
                }
            };
            let mut body = vec![0; length as usize];
            self.0.read_exact(&mut body).ok()?;
            frames.push(body);
            if flags & 1 == 0 {
                return Some(frames);
            }
        }
    }

    /// The number and the events of the next batch.
    fn batch(&mut self) -> (u64, Vec<Value>) {
        let frames = self.frames().expect("a batch");
        let [topic, number, payload] = frames.as_slice() else {
            panic!("three frames: {frames:?}");
        };
        assert_eq!(topic, b"kv@one@demo");
        (number_of(number), events_of(payload))
    }
}

fn number_of(frame: &[u8]) -> u64 {
    u64::from_be_bytes(frame.try_into().expect("eight bytes"))
}

fn events_of(payload: &[u8]) -> Vec<Value> {
    let (_, events, _): (f64, Vec<Value>, u32) = rmp_serde::from_slice(payload).expect("a batch");
    events
}

/// What a router knows: of each block, all tokens up to its end.
#[derive(Debug, Default, PartialEq)]
struct Index(HashMap<u64, Vec<u64>>);

impl Index {
    fn follow(&mut self, events: &[Value]) {
        let numbers = |value: &Value| -> Vec<u64> {
            let list = value.as_array().expect("a list").iter();
            list.map(|number| number.as_u64().expect("a number"))
                .collect()
        };
        for event in events {
            match event["type"].as_str() {
                Some("AllBlocksCleared") => self.0.clear(),
                Some("BlockRemoved") => {
                    for hash in numbers(&event["block_hashes"]) {
                        assert!(self.0.remove(&hash).is_some(), "it was stored");
                    }
                }
                Some("BlockStored") => {
                    let parent = event["parent_block_hash"].as_u64();
                    let mut tokens = parent.map_or(Vec::new(), |parent| self.0[&parent].clone());
                    assert_eq!(event["block_size"], 16);
                    let all = numbers(&event["token_ids"]);
                    let blocks = all.chunks_exact(16);
                    for (hash, block) in numbers(&event["block_hashes"]).into_iter().zip(blocks) {
                        tokens.extend(block);
                        self.0.insert(hash, tokens.clone());
                    }
                }
                other => panic!("an event: {other:?}"),
            }
        }
    }

    /// Tokens at the start of `prompt` that it takes to be held.
    fn held(&self, prompt: &[u64]) -> usize {
        let known = |blocks: &usize| {
            self.0
                .values()
                .any(|tokens| *tokens == prompt[..blocks * 16])
        };
        16 * (1..=prompt.len() / 16).take_while(known).count()
    }
}

fn prompt(topic: &str) -> String {
    format!("{topic}: {}", "Ownership is a set of rules. ".repeat(30))
}

fn rendered(server: &Server, prompt: &str) -> Vec<u64> {
    let rendered = posted(
        server,
        &format!("{COMPLETION}/render"),
        &json!({"prompt": prompt}),
    );
    let ids = rendered[0]["token_ids"].as_array().expect("ids").iter();
    ids.map(|id| id.as_u64().expect("an id")).collect()
}

fn complete(server: &Server, prompt: &str) -> u64 {
    let body = json!({"prompt": prompt, "max_tokens": 4, "temperature": 0});
    let reply = posted(server, COMPLETION, &body);
    let cached = reply.pointer("/usage/prompt_tokens_details/cached_tokens");
    cached.and_then(Value::as_u64).expect("a number")
}

#[test]
fn a_router_that_follows_knows_what_a_prompt_will_find() {
    let server = telling();
    let (Some(address), _) = server.kv_events() else {
        panic!("it tells of events");
    };
    let mut router = Socket::subscriber(address, "kv@");
    assert_eq!(
        router.batch(),
        (0, vec![json!({"type": "AllBlocksCleared"})])
    );
    let (mut index, mut next) = (Index::default(), 1);
    for topic in ["First", "Second"] {
        let prompt = prompt(topic);
        let tokens = rendered(&server, &prompt);
        assert_eq!(complete(&server, &prompt), index.held(&tokens) as u64);
        // All but the last token can be found.
        let findable = (tokens.len() - 1) / 16 * 16;
        while index.held(&tokens) < findable {
            let (number, events) = router.batch();
            assert_eq!(number, next);
            next += 1;
            index.follow(&events);
        }
        let cached = complete(&server, &prompt) as usize;
        assert_eq!(cached / 16 * 16, index.held(&tokens).min(findable));
    }
    assert_nothing_held(&server);
}

#[test]
fn who_comes_later_and_who_missed_some_end_up_with_the_same() {
    let server = telling();
    let (Some(address), Some(replay)) = server.kv_events() else {
        panic!("it tells of events, and replays them");
    };
    complete(&server, &prompt("Earlier"));
    at_rest(&server);
    let mut late = Socket::subscriber(address, "");
    let mut known = Index::default();
    let (mut last, events) = late.batch();
    assert_eq!(events[0], json!({"type": "AllBlocksCleared"}));
    known.follow(&events);
    assert!(known.held(&rendered(&server, &prompt("Earlier"))) > 0);
    complete(&server, &prompt("Later"));
    let tokens = rendered(&server, &prompt("Later"));
    while known.held(&tokens) < (tokens.len() - 1) / 16 * 16 {
        let (number, events) = late.batch();
        last = number;
        known.follow(&events);
    }
    at_rest(&server);
    let mut dealer = Socket::greet(replay, "DEALER");
    let mut ask = |start: u64| {
        dealer.frame(1, b"");
        dealer.frame(0, &start.to_be_bytes());
        // Whoever asks for the last ones knows what came before.
        let mut index = Index(if start == 0 {
            HashMap::new()
        } else {
            known.0.clone()
        });
        let mut numbers = Vec::new();
        loop {
            let frames = dealer.frames().expect("a batch");
            let [empty, _topic, number, payload] = frames.as_slice() else {
                panic!("four frames: {frames:?}");
            };
            assert_eq!(empty, b"");
            match number_of(number) {
                u64::MAX => return (index, numbers),
                number => numbers.push(number),
            }
            index.follow(&events_of(payload));
        }
    };
    let (index, numbers) = ask(0);
    assert!(numbers.iter().copied().eq(0..numbers.len() as u64));
    assert!(numbers.len() as u64 > last, "up to the last that was told");
    assert!(
        known
            .0
            .iter()
            .all(|(hash, tokens)| index.0.get(hash) == Some(tokens))
    );
    let (_, numbers) = ask(last);
    assert_eq!(numbers.first(), Some(&last));
    let (_, numbers) = ask(1 << 40);
    assert!(numbers.is_empty());
}

#[test]
fn what_expires_is_told_of_as_well() {
    let server = start_with(|config| {
        config.kv_events = Some(events());
        config.service.prefix_cache.time_to_live = Some(Duration::from_millis(1500));
    });
    let address = server.kv_events().0.expect("events");
    let mut router = Socket::subscriber(address, "");
    let mut index = Index::default();
    complete(&server, &prompt("Gone"));
    let mut most = 0;
    while most == 0 || !index.0.is_empty() {
        index.follow(&router.batch().1);
        most = most.max(index.0.len());
    }
    until("the cache is empty", || {
        server.engine().status().cache.groups == 0
    });
}

#[test]
fn peers_that_lie_or_vanish_or_do_not_read_hold_nobody_up() {
    let server = telling();
    let (Some(address), Some(replay)) = server.kv_events() else {
        panic!("it tells of events, and replays them");
    };
    let closed = |mut socket: Socket| {
        let mut rest = Vec::new();
        socket.0.read_to_end(&mut rest).ok();
    };
    for address in [address, replay] {
        let mut browser = connect_to(address);
        browser
            .write_all(&b"GET / HTTP/1.1\r\n\r\n".repeat(9))
            .expect("sent");
        closed(Socket(browser));
        let mut other = Socket(connect_to(address));
        other.0.write_all(&[0xFF]).expect("sent");
        drop(other);
    }
    let mut huge = Socket::greet(address, "SUB");
    huge.0
        .write_all(&[2, 255, 255, 255, 255, 0, 0, 0, 0])
        .expect("sent");
    closed(huge);
    let mut dealer = Socket::greet(replay, "DEALER");
    dealer.frame(0, b"no number");
    closed(dealer);
    let deaf: Vec<Socket> = (0..40)
        .filter_map(|_| {
            // Some are more than there may be.
            let mut stream = TcpStream::connect(address).ok()?;
            let mut greeting = [0; 64];
            (greeting[0], greeting[9], greeting[10]) = (0xFF, 0x7F, 3);
            greeting[12..16].copy_from_slice(b"NULL");
            let ready = b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB\0\x01\x01";
            stream.write_all(&[&greeting[..], ready].concat()).ok()?;
            Some(Socket(stream))
        })
        .collect();
    for topic in ["One", "Two", "Three"] {
        complete(&server, &prompt(topic));
    }
    drop(deaf);
    until("there is a place again", || {
        let mut router = connect_to(address);
        router.read_exact(&mut [0; 64]).is_ok()
    });
    assert_nothing_held(&server);
    server.shutdown();
    assert!(
        TcpStream::connect(address).is_err(),
        "it has ended with the server"
    );
}

#[test]
fn keys_that_share_nothing_have_no_common_events() {
    let mut settings = config();
    settings.kv_events = Some(events());
    settings.keys = ApiKeys::new(["first-key", "second-key"]).expect("keys");
    let refused = Server::start(model(), settings.clone()).expect_err("two caches");
    assert!(matches!(refused, StartError::NotShared { keys: 2 }));
    assert!(refused.to_string().contains("share prefixes"));
    settings.share_prefixes = true;
    assert!(Server::start(model(), settings).is_ok());
}
