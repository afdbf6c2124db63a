//! The hub client against a server in this process.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};

use ring::digest;

use super::*;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// How the server treats a request for contents.
#[derive(Clone, Copy, PartialEq)]
enum Manner {
    Proper,
    /// Ends the connection after this many bytes of every body.
    CutAfter(usize),
    /// Answers every request for a part with the whole.
    IgnoreRange,
    /// Sends other bytes than it announced.
    Corrupt,
    /// Sends the contents over and over, in chunks, until nobody reads any more.
    Endless,
    /// Announces these bytes more than the contents have, and sends them.
    Longer(usize),
    /// Announces only this many bytes, and sends them.
    Shorter(usize),
    /// Says nothing of lengths, neither in the list nor with the contents, and goes on for ever.
    Undeclared,
    /// Sends what is asked of `owner/former` on to `owner/name`.
    Renamed,
    /// Announces that so many bytes follow a part, and sends nothing.
    Announced(u64),
    /// Has no part of anything: 416 for whoever asks for one.
    NoParts,
    /// Says nothing of lengths in the list.
    Unlisted,
    /// Has all files in the repository itself, and this wrong in the list of them.
    InGit(Wrong),
    /// Answers everything with this status.
    Status(u16),
}

#[derive(Clone, Copy, PartialEq)]
enum Wrong {
    Nothing,
    Hashes,
    /// There are no names for contents.
    Names,
}

/// What the server has, does, and was asked.
struct State {
    files: HashMap<String, Vec<u8>>,
    manner: Manner,
    requests: Vec<String>,
}

/// A server that sends all requests on to `target`, and what it was asked: lines of headers.
fn redirecting(target: &str) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let (target, shared) = (target.to_owned(), Arc::clone(&asked));
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let lines = BufReader::new(&stream).lines().map_while(Result::ok);
            let lines: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
            let path = lines[0].split(' ').nth(1).unwrap_or_default();
            let location = format!("Location: {target}{path}\r\n");
            shared.lock().unwrap().extend(lines.iter().cloned());
            let _ = send(&stream, "307 Elsewhere", &location, b"", usize::MAX);
        }
    });
    (endpoint, asked)
}

struct Server {
    endpoint: String,
    state: Arc<Mutex<State>>,
}

impl Server {
    fn start(files: &[(&str, &[u8])]) -> Self {
        let files = files
            .iter()
            .map(|(name, bytes)| ((*name).to_owned(), bytes.to_vec()))
            .collect();
        let state = State {
            files,
            manner: Manner::Proper,
            requests: Vec::new(),
        };
        let state = Arc::new(Mutex::new(state));
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                // A client that goes away is not the server's concern.
                let _ = answer(&stream, &shared);
            }
        });
        Self { endpoint, state }
    }

    fn behave(&self, manner: Manner) {
        self.state.lock().unwrap().manner = manner;
    }

    fn requests(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().unwrap().requests)
    }

    fn hub(&self, cache: &Path) -> Hub {
        self.hub_with(cache, None)
    }

    fn hub_with(&self, cache: &Path, token: Option<&str>) -> Hub {
        Hub::new(Settings {
            endpoint: self.endpoint.clone(),
            cache: cache.to_owned(),
            token: token.map(str::to_owned),
            offline: false,
        })
    }
}

fn sha256(bytes: &[u8]) -> String {
    digest::digest(&digest::SHA256, bytes)
        .as_ref()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

/// Answers one request and closes the connection.
fn answer(stream: &TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream).lines();
    let first = lines.next().unwrap_or_else(|| Ok(String::new()))?;
    let headers: Vec<String> = lines
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty())
        .collect();
    let target = first.split(' ').nth(1).unwrap_or_default().to_owned();
    let header = |name: &str| {
        let prefix = format!("{name}: ");
        headers
            .iter()
            .find(|line| line.to_ascii_lowercase().starts_with(&prefix))
            .map(|line| line[prefix.len()..].to_owned())
    };
    let range = header("range")
        .and_then(|range| range["bytes=".len()..].trim_end_matches('-').parse().ok());
    let mut state = state.lock().unwrap();
    state.requests.push(format!(
        "{target} {} {}",
        header("authorization").unwrap_or_default(),
        range.unwrap_or(0)
    ));
    if let Manner::Status(status) = state.manner {
        return send(stream, &format!("{status} No"), "", b"", usize::MAX);
    }
    if state.manner == Manner::Renamed && target.contains("/former/") {
        let location = format!("Location: {}\r\n", target.replace("/former/", "/name/"));
        return send(stream, "301 Moved", &location, b"", usize::MAX);
    }
    let revision = target.strip_prefix("/api/models/owner/name/revision/");
    if revision.is_some_and(|name| name.starts_with("main") || name.starts_with(COMMIT)) {
        return send(
            stream,
            "200 OK",
            "",
            match state.manner {
                Manner::InGit(wrong) => git_listing(&state.files, wrong),
                manner => listing(
                    &state.files,
                    !matches!(manner, Manner::Undeclared | Manner::Unlisted),
                ),
            }
            .as_bytes(),
            usize::MAX,
        );
    }
    let contents = target
        .strip_prefix(&format!("/owner/name/resolve/{COMMIT}/"))
        .and_then(|name| state.files.get(name));
    match contents {
        Some(contents) if matches!(state.manner, Manner::Endless | Manner::Undeclared) => {
            let contents = contents.clone();
            // The next request must not wait for this one's end.
            drop(state);
            send_without_end(stream, &contents)
        }
        Some(contents) => send_contents(stream, contents, range.unwrap_or(0), state.manner),
        None => send(stream, "404 Not Found", "", b"", usize::MAX),
    }
}

fn listing(files: &HashMap<String, Vec<u8>>, sizes: bool) -> String {
    let siblings: Vec<String> = files
        .iter()
        .map(|(name, bytes)| {
            let (size, hash) = (bytes.len(), sha256(bytes));
            if !sizes {
                return format!(r#"{{"rfilename":"{name}","blobId":"00ff"}}"#);
            }
            format!(r#"{{"rfilename":"{name}","size":{size},"blobId":"00ff","lfs":{{"sha256":"{hash}","size":{size}}}}}"#)
        })
        .collect();
    format!(
        r#"{{"id":"owner/name","sha":"{COMMIT}","siblings":[{}]}}"#,
        siblings.join(",")
    )
}

fn git_listing(files: &HashMap<String, Vec<u8>>, wrong: Wrong) -> String {
    let siblings = files.iter().map(|(name, bytes)| {
        let object = [format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat();
        let hash = digest::digest(&digest::SHA1_FOR_LEGACY_USE_ONLY, &object);
        let hash: String = hash.as_ref().iter().map(|it| format!("{it:02X}")).collect();
        let size = bytes.len();
        match wrong {
            Wrong::Names => format!(r#"{{"rfilename":"{name}","size":{size}}}"#),
            Wrong::Hashes => {
                format!(r#"{{"rfilename":"{name}","size":{size},"blobId":"{COMMIT}"}}"#)
            }
            // A list may leave lengths out.
            Wrong::Nothing => format!(r#"{{"rfilename":"{name}","blobId":"{hash}"}}"#),
        }
    });
    let siblings: Vec<String> = siblings.collect();
    let siblings = siblings.join(",");
    format!(r#"{{"id":"owner/name","sha":"{COMMIT}","siblings":[{siblings}]}}"#)
}

fn send_contents(
    stream: &TcpStream,
    contents: &[u8],
    start: usize,
    manner: Manner,
) -> std::io::Result<()> {
    let cut = if let Manner::CutAfter(bytes) = manner {
        bytes
    } else {
        usize::MAX
    };
    match manner {
        Manner::Corrupt => send(stream, "200 OK", "", &vec![b'!'; contents.len()], cut),
        Manner::IgnoreRange => send(stream, "200 OK", "", contents, cut),
        Manner::Longer(more) => {
            let longer = [contents, &vec![b'!'; more]].concat();
            send(stream, "200 OK", "", &longer, cut)
        }
        Manner::Announced(rest) => {
            let mut stream = stream;
            write!(
                stream,
                "HTTP/1.1 206 Partial Content\r\nContent-Range: bytes {start}-{rest}/*\r\n\
                 Content-Length: {rest}\r\nConnection: close\r\n\r\n"
            )
        }
        Manner::NoParts if start > 0 => send(stream, "416 No", "", b"", cut),
        Manner::Shorter(bytes) => send(stream, "200 OK", "", &contents[..bytes], cut),
        _ if start > 0 => {
            let range = format!(
                "Content-Range: bytes {start}-{}/{}\r\n",
                contents.len() - 1,
                contents.len()
            );
            send(
                stream,
                "206 Partial Content",
                &range,
                &contents[start..],
                cut,
            )
        }
        _ => send(stream, "200 OK", "", contents, cut),
    }
}

fn send_without_end(mut stream: &TcpStream, piece: &[u8]) -> std::io::Result<()> {
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )?;
    loop {
        write!(stream, "{:x}\r\n", piece.len())?;
        stream.write_all(piece)?;
        stream.write_all(b"\r\n")?;
    }
}

fn send(
    mut stream: &TcpStream,
    status: &str,
    more: &str,
    body: &[u8],
    cut: usize,
) -> std::io::Result<()> {
    let length = body.len();
    write!(
        stream,
        "HTTP/1.1 {status}\r\n{more}Content-Length: {length}\r\nConnection: close\r\n\r\n"
    )?;
    stream.write_all(&body[..length.min(cut)])
}

fn folder_files() -> [(&'static str, &'static [u8]); 4] {
    [
        ("README.md", b"not wanted"),
        ("config.json", b"{}"),
        ("tokenizer.json", b"{ }"),
        ("model.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
    ]
}

fn id(text: &str) -> HubId {
    text.parse().unwrap()
}

#[test]
fn a_model_is_downloaded_once_and_then_found_without_asking() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&folder_files());
    let hub = server.hub_with(cache.path(), Some("secret"));
    let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
    assert_eq!(
        path,
        cache
            .path()
            .join("models--owner--name/snapshots")
            .join(COMMIT)
    );
    assert_eq!(std::fs::read(path.join("config.json")).unwrap(), b"{}");
    assert!(!path.join("README.md").exists());
    let requests = server.requests();
    assert_eq!(requests.len(), 4);
    assert!(
        requests
            .iter()
            .all(|request| request.contains("Bearer secret")),
        "{requests:?}"
    );

    server.behave(Manner::Status(500));
    assert_eq!(hub.fetch(&id("owner/name"), &mut ()).unwrap(), path);
    assert_eq!(
        hub.fetch(&id(&format!("owner/name@{COMMIT}")), &mut ())
            .unwrap(),
        path
    );
    assert!(server.requests().is_empty());
}

#[cfg(unix)]
#[test]
fn the_cache_has_the_layout_other_clients_use() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("sub/m-Q8_0.gguf", b"GGUF")]);
    let path = server
        .hub(cache.path())
        .fetch(&id("owner/name:Q8_0"), &mut ())
        .unwrap();
    let repository = cache.path().join("models--owner--name");
    assert_eq!(
        std::fs::read_to_string(repository.join("refs/main")).unwrap(),
        COMMIT
    );
    assert_eq!(
        path,
        repository
            .join("snapshots")
            .join(COMMIT)
            .join("sub/m-Q8_0.gguf")
    );
    let target = std::fs::read_link(&path).unwrap();
    assert_eq!(target, Path::new("../../../blobs").join(sha256(b"GGUF")));
    assert_eq!(std::fs::read(&path).unwrap(), b"GGUF");
}

#[test]
fn a_model_in_several_files_is_fetched_by_its_index() {
    let cache = tempfile::tempdir().unwrap();
    let index = br#"{"weight_map": {"a": "x.safetensors", "b": "y.safetensors"}}"#;
    let files: [(&str, &[u8]); 5] = [
        ("config.json", b"{}"),
        ("tokenizer.json", b"{ }"),
        ("model.safetensors.index.json", index),
        ("x.safetensors", b"x"),
        ("y.safetensors", b"y"),
    ];
    let server = Server::start(&files);
    let hub = server.hub(cache.path());
    let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
    assert_eq!(std::fs::read(path.join("y.safetensors")).unwrap(), b"y");
    server.requests();

    std::fs::remove_file(path.join("y.safetensors")).unwrap();
    hub.fetch(&id("owner/name"), &mut ()).unwrap();
    assert_eq!(
        server.requests().len(),
        1,
        "the contents are still there: only the list is asked for"
    );
    assert!(path.join("y.safetensors").exists());
}

#[test]
fn an_interrupted_download_is_no_model_and_is_continued() {
    let cache = tempfile::tempdir().unwrap();
    let contents: Vec<u8> = (0..100_000u32).flat_map(u32::to_le_bytes).collect();
    let server = Server::start(&[("m.gguf", &contents)]);
    let hub = server.hub(cache.path());
    let model = id("owner/name");
    server.behave(Manner::CutAfter(150_000));
    let error = hub.fetch(&model, &mut ()).unwrap_err();
    let Error::Interrupted {
        received, expected, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!((*received, *expected), (150_000, Some(400_000)));
    assert!(
        error.to_string().contains("run the same command again"),
        "{error}"
    );

    server.behave(Manner::Status(500));
    assert!(matches!(
        hub.fetch(&model, &mut ()),
        Err(Error::Status { status: 500, .. })
    ));
    server.requests();

    server.behave(Manner::Proper);
    let path = hub.fetch(&model, &mut ()).unwrap();
    assert!(std::fs::read(path).unwrap() == contents);
    assert!(server.requests()[1].ends_with(" 150000"));
}

#[test]
fn a_server_that_starts_over_is_followed() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"0123456789")]);
    let hub = server.hub(cache.path());
    server.behave(Manner::CutAfter(4));
    hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
    server.behave(Manner::IgnoreRange);
    let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), b"0123456789");
}

#[test]
fn a_length_beyond_all_numbers_is_too_long() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"0123456789")]);
    let hub = server.hub(cache.path());
    server.behave(Manner::CutAfter(4));
    hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
    server.behave(Manner::Announced(u64::MAX));
    let error = hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
    assert!(matches!(error, Error::TooLong { .. }), "{error}");
}

/// It was refused every time, until somebody removed the partial file.
#[test]
fn a_part_that_the_server_does_not_have_is_asked_for_as_a_whole() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"0123456789")]);
    let hub = server.hub(cache.path());
    server.behave(Manner::CutAfter(4));
    hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
    server.behave(Manner::NoParts);
    let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), b"0123456789");
}

#[test]
fn contents_that_are_not_what_was_announced_are_discarded() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"0123456789")]);
    let hub = server.hub(cache.path());
    server.behave(Manner::Corrupt);
    let error = hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    server.behave(Manner::Proper);
    let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), b"0123456789");
}

/// The bytes of every file below a folder.
fn bytes_below(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_below(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    entries.map(bytes).sum()
}

#[test]
fn a_download_that_goes_on_past_its_length_is_stopped_and_discarded() {
    let contents = vec![7; 300_000];
    let server = Server::start(&[("m.gguf", &contents)]);
    for (manner, reached) in [(Manner::Endless, 300_001), (Manner::Longer(5), 300_005)] {
        let cache = tempfile::tempdir().unwrap();
        let hub = server.hub(cache.path());
        server.behave(manner);
        // Without a bound this did not return before the disk was full.
        let error = hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
        let Error::TooLong {
            file,
            declared,
            received,
        } = &error
        else {
            panic!("{error}")
        };
        assert_eq!((file.as_str(), *declared), ("m.gguf", 300_000));
        assert_eq!(*received, reached, "{error}");
        assert_eq!(bytes_below(cache.path()), 0, "nothing of it is kept");
        server.behave(Manner::Proper);
        let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
        assert!(std::fs::read(path).unwrap() == contents);
    }
}

#[test]
fn a_continued_download_is_bounded_too() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"0123456789")]);
    let hub = server.hub(cache.path());
    server.behave(Manner::CutAfter(4));
    hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
    assert_eq!(bytes_below(cache.path()), 4);
    server.behave(Manner::Endless);
    let error = hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
    assert!(matches!(error, Error::TooLong { .. }), "{error}");
    assert_eq!(bytes_below(cache.path()), 0);
}

#[test]
fn a_download_that_announces_less_than_the_list_said_is_kept_to_be_continued() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"0123456789")]);
    let hub = server.hub(cache.path());
    server.behave(Manner::Shorter(6));
    let error = hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
    let Error::Interrupted {
        received, expected, ..
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!((*received, *expected), (6, Some(10)));
    server.requests();
    server.behave(Manner::Proper);
    let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), b"0123456789");
    assert!(server.requests()[1].ends_with(" 6"));
}

#[test]
fn a_download_of_which_nobody_says_the_length_ends_too() {
    let cache = tempfile::tempdir().unwrap();
    let contents = vec![7; 1 << 20];
    let server = Server::start(&[("m.gguf", &contents)]);
    server.behave(Manner::Undeclared);
    let error = server
        .hub(cache.path())
        .fetch(&id("owner/name"), &mut ())
        .unwrap_err();
    assert!(matches!(error, Error::Undeclared { .. }), "{error}");
    assert_eq!(bytes_below(cache.path()), 0);
}

#[test]
fn what_the_hub_refuses_says_what_to_do() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&folder_files());
    let hub = server.hub(cache.path());
    server.behave(Manner::Status(401));
    let error = hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
    assert!(matches!(error, Error::Refused { status: 401, .. }));
    assert!(error.to_string().contains("HF_TOKEN"), "{error}");
    server.behave(Manner::Proper);
    assert!(matches!(
        hub.fetch(&id("owner/other"), &mut ()),
        Err(Error::NotFound { .. })
    ));
    let error = hub.fetch(&id("owner/name:Q8_0"), &mut ()).unwrap_err();
    assert!(matches!(error, Error::NoSuchFile { .. }), "{error}");
}

#[test]
fn no_message_shows_the_password_of_the_hub() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&folder_files());
    let address = server.endpoint.strip_prefix("http://").unwrap();
    let message = |address: &str| {
        let hub = Hub::new(Settings {
            endpoint: format!("http://user:secret@{address}"),
            cache: cache.path().to_owned(),
            token: Some("secret".to_owned()),
            offline: false,
        });
        let error = hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
        format!("{error} {error:?} {hub:?}")
    };
    for status in [401, 404, 500] {
        server.behave(Manner::Status(status));
        let message = message(address);
        assert!(message.contains(address), "{message}");
        assert!(!message.contains("secret"), "{message}");
    }
    for address in ["127.0.0.1:1", "no host", "127.0.0.1:99999"] {
        let message = message(address);
        assert!(!message.contains("secret"), "{message}");
    }
}

#[test]
fn without_a_connection_only_the_cache_helps() {
    let cache = tempfile::tempdir().unwrap();
    let unused = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", unused.local_addr().unwrap());
    drop(unused);
    let mut settings = Settings {
        endpoint,
        cache: cache.path().to_owned(),
        token: None,
        offline: false,
    };
    let error = Hub::new(settings.clone())
        .fetch(&id("owner/name"), &mut ())
        .unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    settings.offline = true;
    let error = Hub::new(settings.clone())
        .fetch(&id("owner/name"), &mut ())
        .unwrap_err();
    assert!(matches!(error, Error::Offline { .. }), "{error}");

    // Weights that another client fetched without their tokenizer are better than nothing.
    let snapshot = cache
        .path()
        .join("models--owner--name/snapshots")
        .join(COMMIT);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::write(snapshot.join("config.json"), b"{}").unwrap();
    std::fs::write(snapshot.join("model.safetensors"), b"x").unwrap();
    let found = Hub::new(settings)
        .fetch(&id(&format!("owner/name@{COMMIT}")), &mut ())
        .unwrap();
    assert_eq!(found, snapshot);
}

#[test]
fn an_answer_that_is_not_a_hubs_is_a_typed_error() {
    let cache = tempfile::tempdir().unwrap();
    for answer in ["<html>", "{}", r#"{"sha":"../../x","siblings":[]}"#] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let mut reader = BufReader::new(&stream).lines();
            while reader
                .next()
                .is_some_and(|line| line.is_ok_and(|line| !line.is_empty()))
            {}
            send(&stream, "200 OK", "", answer.as_bytes(), usize::MAX)
        });
        let settings = Settings {
            endpoint,
            cache: cache.path().to_owned(),
            token: None,
            offline: false,
        };
        let error = Hub::new(settings)
            .fetch(&id("owner/name"), &mut ())
            .unwrap_err();
        assert!(matches!(error, Error::BadAnswer { .. }), "{error}");
        server.join().unwrap().unwrap();
    }
}

#[test]
fn names_that_lead_out_of_the_cache_are_ignored() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[
        ("../../evil.gguf", b"x"),
        ("/etc/evil.gguf", b"x"),
        ("m.gguf", b"GGUF"),
    ]);
    let path = server
        .hub(cache.path())
        .fetch(&id("owner/name"), &mut ())
        .unwrap();
    assert!(path.ends_with("m.gguf"));
}

#[test]
fn two_processes_do_not_write_the_same_file() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"GGUF")]);
    let blobs = cache.path().join("models--owner--name/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let other = std::fs::File::create(blobs.join(format!("{}.lacuna.incomplete", sha256(b"GGUF"))))
        .unwrap();
    other.lock().unwrap();
    let hub = server.hub(cache.path());
    assert!(matches!(
        hub.fetch(&id("owner/name"), &mut ()),
        Err(Error::Busy { .. })
    ));
    drop(other);
    assert!(hub.fetch(&id("owner/name"), &mut ()).is_ok());
}

/// The second had opened the partial file before the first renamed it, and emptied what was the blob by then.
#[test]
fn a_partial_file_that_became_a_blob_is_not_written_to() {
    let folder = tempfile::tempdir().unwrap();
    let (path, blob) = (folder.path().join("0.incomplete"), folder.path().join("0"));
    let open = || cache::open_partial(&path).unwrap();
    let second = open();
    std::fs::rename(&path, &blob).unwrap();
    assert!(cache::lock(second, &path).unwrap().is_none());
    // Nor is it where another partial file is there.
    let second = open();
    std::fs::rename(&path, &blob).unwrap();
    let third = open();
    assert!(cache::lock(second, &path).unwrap().is_none());
    assert!(cache::lock(third, &path).unwrap().is_some());
}

/// A file of a hub, four bytes long.
fn four_bytes(path: &str) -> RemoteFile {
    RemoteFile {
        path: path.to_owned(),
        size: Some(4),
        blob: "00ff".to_owned(),
        hash: None,
    }
}

/// Both used to be made in place: links were there already for the second, and a branch was empty for a moment.
#[test]
fn links_and_branches_are_made_by_several_processes_at_once() {
    let cache = tempfile::tempdir().unwrap();
    let repository = Repository::new(cache.path(), "owner/name");
    let file = four_bytes("sub/m.gguf");
    let mut partial = repository.partial(&file).unwrap();
    partial.append(b"GGUF").unwrap();
    partial.complete(&file, 4).unwrap();
    repository.set_reference("main", COMMIT).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for number in 0..200 {
                    repository.set_reference("main", COMMIT).unwrap();
                    let branch = repository.root().join("refs/main");
                    assert_eq!(std::fs::read_to_string(branch).unwrap(), COMMIT);
                    let commit = format!("{COMMIT}{number}");
                    repository.link(&commit, &file).unwrap();
                    let link = repository.snapshot(&commit).join("sub/m.gguf");
                    assert_eq!(std::fs::read(link).unwrap(), b"GGUF");
                }
            });
        }
    });
    let own = std::fs::read_dir(repository.root().join(".lacuna"));
    assert_eq!(own.unwrap().count(), 0);
}

/// What is checked is what arrived; what becomes the blob is a file.
#[test]
fn contents_that_another_program_added_to_are_discarded() {
    let cache = tempfile::tempdir().unwrap();
    let repository = Repository::new(cache.path(), "owner/name");
    let file = four_bytes("m.gguf");
    let mut partial = repository.partial(&file).unwrap();
    partial.append(b"GGUF").unwrap();
    let blobs = repository.root().join("blobs");
    let path = blobs.join("00ff.lacuna.incomplete");
    let mut other = std::fs::OpenOptions::new();
    let mut other = other.append(true).open(path).unwrap();
    other.write_all(b"more").unwrap();
    let refused = partial.complete(&file, 4);
    assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
    assert!(!repository.has_blob(&file));
    assert_eq!(bytes_below(&blobs), 0);
}

/// Contents of the right length were taken for those of the list.
#[test]
fn files_of_the_repository_itself_are_what_git_calls_them() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"GGUF")]);
    server.behave(Manner::InGit(Wrong::Hashes));
    let fetch = || server.hub(cache.path()).fetch(&id("owner/name"), &mut ());
    let refused = fetch();
    assert!(matches!(refused, Err(Error::Corrupt { .. })), "{refused:?}");
    let blobs = cache.path().join("models--owner--name/blobs");
    assert_eq!(bytes_below(&blobs), 0);
    server.behave(Manner::InGit(Wrong::Nothing));
    assert_eq!(std::fs::read(fetch().unwrap()).unwrap(), b"GGUF");
}

/// Both were `a--m.gguf` in the cache, and the second was taken for the first.
#[test]
fn files_without_names_of_their_own_are_told_apart() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("a/m.gguf", b"GGU1"), ("a--m.gguf", b"GGU2")]);
    server.behave(Manner::InGit(Wrong::Names));
    for (file, contents) in [("a/m.gguf", b"GGU1"), ("a--m.gguf", b"GGU2")] {
        let fetched = server
            .hub(cache.path())
            .fetch(&id(&format!("owner/name:{file}")), &mut ());
        assert_eq!(std::fs::read(fetched.unwrap()).unwrap(), contents, "{file}");
    }
}

/// They stayed for as long as the repository did.
#[test]
fn what_was_begun_of_contents_that_are_there_goes() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"GGUF"), ("n.gguf", b"GGUN")]);
    let blobs = cache.path().join("models--owner--name/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let begin = |contents: &[u8], hours: u64| {
        let path = blobs.join(format!("{}.incomplete", sha256(contents)));
        std::fs::write(&path, "GG").unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        let modified = std::time::SystemTime::now() - std::time::Duration::from_secs(hours * 3600);
        file.set_modified(modified).unwrap();
        path
    };
    let (old, others, fresh) = (begin(b"GGUF", 2), begin(b"GGUO", 2), begin(b"GGUN", 0));
    for file in ["m.gguf", "n.gguf"] {
        let fetched = server
            .hub(cache.path())
            .fetch(&id(&format!("owner/name:{file}")), &mut ());
        fetched.unwrap();
    }
    assert!(!old.exists(), "nobody continues what is there");
    assert!(others.exists(), "of other contents");
    assert!(fresh.exists(), "somebody may be writing to it");
    server
        .hub(cache.path())
        .remove(&id("owner/name:n.gguf"))
        .unwrap();
    assert!(
        !fresh.exists() && others.exists(),
        "it goes with its contents"
    );
}

#[test]
fn a_partial_file_of_another_client_is_left_to_it() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"GGUF")]);
    let blobs = cache.path().join("models--owner--name/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let theirs = blobs.join(format!("{}.incomplete", sha256(b"GGUF")));
    std::fs::write(&theirs, "GG").unwrap();
    let path = server.hub(cache.path()).fetch(&id("owner/name"), &mut ());
    assert_eq!(std::fs::read(path.unwrap()).unwrap(), b"GGUF");
    assert_eq!(std::fs::read(&theirs).unwrap(), b"GG");
}

#[test]
fn what_another_has_finished_meanwhile_is_not_downloaded_again() {
    for _ in 0..20 {
        let cache = tempfile::tempdir().unwrap();
        let server = Server::start(&[("m.gguf", b"GGUF")]);
        server.behave(Manner::Unlisted);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let hub = server.hub(cache.path());
                    let path = loop {
                        match hub.fetch(&id("owner/name"), &mut ()) {
                            Err(Error::Busy { .. }) => std::thread::yield_now(),
                            fetched => break fetched.unwrap(),
                        }
                    };
                    assert_eq!(std::fs::read(path).unwrap(), b"GGUF");
                });
            }
        });
        let requests = server.requests();
        let contents = requests.iter().filter(|line| line.contains("/resolve/"));
        assert_eq!(contents.count(), 1, "{requests:?}");
        let blobs = cache.path().join("models--owner--name/blobs");
        assert_eq!(std::fs::read_dir(blobs).unwrap().count(), 1);
    }
}

/// Hosts were compared without their ports.
#[test]
fn the_token_goes_to_the_hub_and_not_to_another_port_of_its_host() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"GGUF")]);
    let (endpoint, asked) = redirecting(&server.endpoint);
    let hub = Hub::new(Settings {
        endpoint,
        cache: cache.path().to_owned(),
        token: Some("secret".to_owned()),
        offline: false,
    });
    hub.fetch(&id("owner/name"), &mut ()).unwrap();
    let asked = asked.lock().unwrap().join("\n");
    assert!(asked.contains("Bearer secret"), "{asked}");
    let requests = server.requests();
    assert_eq!(requests.len(), 2);
    assert!(!requests.concat().contains("secret"), "{requests:?}");
}

/// As of a repository that has another name now: what is sent on within the hub is asked with the token.
#[test]
fn redirects_within_the_hub_are_followed_with_the_token() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"GGUF")]);
    server.behave(Manner::Renamed);
    let hub = server.hub_with(cache.path(), Some("secret"));
    let path = hub.fetch(&id("owner/former"), &mut ()).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), b"GGUF");
    let requests = server.requests();
    assert_eq!(requests.len(), 4);
    for request in requests {
        assert!(request.contains("Bearer secret"), "{request}");
    }
}

#[test]
fn redirects_that_do_not_end_are_an_error() {
    let cache = tempfile::tempdir().unwrap();
    let (endpoint, _) = redirecting("");
    let hub = Hub::new(Settings {
        endpoint,
        cache: cache.path().to_owned(),
        token: None,
        offline: false,
    });
    let error = hub.fetch(&id("owner/name"), &mut ()).unwrap_err();
    assert!(matches!(error, Error::Unreachable { .. }), "{error}");
}

#[test]
fn progress_is_told_per_file() {
    #[derive(Default)]
    struct Log(Vec<String>);
    impl Progress for Log {
        fn begin(&mut self, item: &str, total: Option<u64>) {
            self.0.push(format!("{item} {total:?}"));
        }
        fn advance(&mut self, bytes: u64) {
            self.0.push(format!("+{bytes}"));
        }
        fn finish(&mut self) {
            self.0.push("done".to_owned());
        }
    }
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"GGUF")]);
    let mut log = Log::default();
    server
        .hub(cache.path())
        .fetch(&id("owner/name"), &mut log)
        .unwrap();
    assert_eq!(log.0, ["m.gguf Some(4)", "+0", "+4", "done"]);
}

#[test]
fn what_is_held_is_told_by_the_names_that_open_it() {
    let folder: &[(&str, &[u8])] = &folder_files();
    let files: &[(&str, &[u8])] = &[
        ("m-Q4_0.gguf", b"GGUF4"),
        ("m-Q8_0-00001-of-00002.gguf", b"GGUF"),
        ("m-Q8_0-00002-of-00002.gguf", b"GGUF of two"),
    ];
    let split = "owner/name:m-Q8_0-00001-of-00002.gguf";
    for (repository, wanted, expected) in [
        (
            folder,
            &["owner/name"][..],
            &[("owner/name", 2 + 3 + 10)][..],
        ),
        (
            files,
            &["owner/name:Q4_0", "owner/name:Q8_0"],
            &[("owner/name:m-Q4_0.gguf", 5), (split, 4 + 11)],
        ),
    ] {
        let cache = tempfile::tempdir().unwrap();
        let server = Server::start(repository);
        let hub = server.hub(cache.path());
        assert_eq!(hub.held(), []);
        for wanted in wanted {
            hub.fetch(&id(wanted), &mut ()).unwrap();
        }
        let held = hub.held();
        let told = held.iter().map(|model| (model.id.as_str(), model.bytes));
        assert_eq!(told.collect::<Vec<_>>(), expected);
        server.behave(Manner::Status(500));
        for model in held {
            assert_eq!(hub.fetch(&id(&model.id), &mut ()).unwrap(), model.path);
        }
    }
}

#[test]
fn a_model_that_is_removed_frees_what_no_other_has() {
    let cache = tempfile::tempdir().unwrap();
    // Two names of the same contents.
    let files: [(&str, &[u8]); 3] = [
        ("a-Q4_0.gguf", b"GGUF same"),
        ("b-Q4_0.gguf", b"GGUF same"),
        ("c-Q8_0.gguf", b"GGUF other"),
    ];
    let hub = Server::start(&files).hub(cache.path());
    for file in files {
        hub.fetch(&id(&format!("owner/name:{}", file.0)), &mut ())
            .unwrap();
    }
    let remove = |file: &str| hub.remove(&id(&format!("owner/name:{file}"))).unwrap();
    #[cfg(unix)]
    assert_eq!(remove("a-Q4_0.gguf"), 0, "the other name still has it");
    #[cfg(not(unix))]
    remove("a-Q4_0.gguf");
    let left: Vec<_> = hub.held().into_iter().map(|model| model.id).collect();
    assert_eq!(left, ["owner/name:b-Q4_0.gguf", "owner/name:c-Q8_0.gguf"]);
    assert_eq!(remove("c-Q8_0.gguf"), 10);
    assert!(matches!(
        hub.remove(&id("owner/name:c-Q8_0.gguf")),
        Err(Error::NotHeld { .. })
    ));
    assert_eq!(hub.remove(&id("owner/name")).unwrap(), 9);
    assert_eq!(hub.held(), []);
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
    assert!(matches!(
        hub.remove(&id("owner/name")),
        Err(Error::NotHeld { .. })
    ));
}

#[test]
fn a_model_that_is_being_downloaded_is_not_removed() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("m.gguf", b"GGUF")]);
    let hub = server.hub(cache.path());
    hub.fetch(&id("owner/name"), &mut ()).unwrap();
    let blobs = cache.path().join("models--owner--name/blobs");
    let partial = std::fs::File::create(blobs.join("0.incomplete")).unwrap();
    partial.lock().unwrap();
    let refused = hub.remove(&id("owner/name"));
    assert!(matches!(refused, Err(Error::Busy { .. })), "{refused:?}");
    partial.unlock().unwrap();
    hub.remove(&id("owner/name")).unwrap();
}

/// Other clients keep packages of other programs beside the weights, in folders of any depth and under names of any bytes.
#[cfg(target_os = "linux")]
#[test]
fn what_is_removed_by_file_takes_no_other_file_however_deep_or_named() {
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    let cache = tempfile::tempdir().unwrap();
    let hub = Server::start(&[("m.gguf", b"GGUF")]).hub(cache.path());
    hub.fetch(&id("owner/name"), &mut ()).unwrap();
    let root = cache.path().join("models--owner--name");
    let snapshot = root.join("snapshots").join(COMMIT);
    let weights = snapshot.join("coreml/m.mlpackage/Data/com.apple.CoreML/weights");
    let bytes = snapshot.join(std::ffi::OsStr::from_bytes(b"caf\xe9.bin"));
    std::fs::create_dir_all(&weights).unwrap();
    for (blob, link) in [("deep", &weights.join("weight.bin")), ("bytes", &bytes)] {
        std::fs::write(root.join("blobs").join(blob), blob).unwrap();
        symlink(root.join("blobs").join(blob), link).unwrap();
    }
    // A folder that leads back to where it is.
    symlink(&snapshot, snapshot.join("again")).unwrap();
    assert_eq!(hub.remove(&id("owner/name:m.gguf")).unwrap(), 4);
    assert_eq!(std::fs::read(weights.join("weight.bin")).unwrap(), b"deep");
    assert_eq!(std::fs::read(&bytes).unwrap(), b"bytes");
    assert!(!root.join("blobs").join(sha256(b"GGUF")).exists());
}

/// A cache as a client leaves it that fetched what it needs of an encoder, and not how it pools.
fn cache_of_another_client(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let cache = tempfile::tempdir().unwrap();
    let root = cache.path().join("models--owner--name");
    let snapshot = root.join("snapshots").join(COMMIT);
    std::fs::create_dir_all(&snapshot).unwrap();
    std::fs::create_dir_all(root.join("refs")).unwrap();
    std::fs::write(root.join("refs/main"), COMMIT).unwrap();
    for (name, contents) in files {
        std::fs::write(snapshot.join(name), contents).unwrap();
    }
    cache
}

#[test]
fn what_another_client_left_out_is_fetched_once() {
    let folder = folder_files();
    let cache = cache_of_another_client(&folder[1..]);
    let pooling: [(&str, &[u8]); 2] = [
        ("modules.json", b"[]"),
        ("1_Pooling/config.json", b"{ \"a\": 1 }"),
    ];
    let server = Server::start(&[&folder[..], &pooling].concat());
    let hub = server.hub(cache.path());
    let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
    for (name, contents) in pooling {
        assert_eq!(std::fs::read(path.join(name)).unwrap(), contents);
    }
    let requests = server.requests();
    assert_eq!(
        requests.len(),
        3,
        "the list and what was absent: {requests:?}"
    );
    assert!(
        requests[0].contains(COMMIT),
        "of what is there: {requests:?}"
    );
    assert_eq!(hub.fetch(&id("owner/name"), &mut ()).unwrap(), path);
    assert!(server.requests().is_empty());
}

#[test]
fn what_another_client_left_does_where_the_hub_does_not_answer() {
    let cache = cache_of_another_client(&folder_files()[1..]);
    let server = Server::start(&folder_files());
    let hub = server.hub(cache.path());
    for status in [401, 404, 500] {
        server.behave(Manner::Status(status));
        let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
        assert!(path.ends_with(COMMIT));
    }
    server.requests();
    let offline = Hub::new(Settings {
        offline: true,
        ..hub.settings.clone()
    });
    assert!(offline.fetch(&id("owner/name"), &mut ()).is_ok());
    assert!(server.requests().is_empty());
}

/// One GGUF file of another client was opened by the repository's name, whatever else the hub has.
#[test]
fn what_another_client_left_stays_the_model_that_is_meant() {
    let gguf: [(&str, &[u8]); 1] = [("m-Q4_0.gguf", b"GGUF")];
    let more: [(&str, &[u8]); 1] = [("m-Q8_0.gguf", b"GGUF too")];
    for others in [&more[..], &folder_files()[..]] {
        let cache = cache_of_another_client(&gguf);
        let server = Server::start(&[&gguf[..], others].concat());
        let hub = server.hub(cache.path());
        for requests in [1, 0] {
            let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
            assert!(path.ends_with("m-Q4_0.gguf"));
            assert_eq!(server.requests().len(), requests);
        }
    }
}

#[test]
fn a_model_is_found_in_a_cache_that_cannot_be_written_to() {
    let folder = folder_files();
    let cache = cache_of_another_client(&folder[1..]);
    // In the way of what would be made, also for a user whom no permissions hold.
    let own = cache.path().join("models--owner--name/.lacuna");
    std::fs::write(own, "no folder").unwrap();
    let server = Server::start(&folder);
    let hub = server.hub(cache.path());
    assert!(hub.fetch(&id("owner/name"), &mut ()).is_ok());
}

/// It stayed, although the message of whoever opened it said to download it again.
#[test]
fn a_file_that_was_cut_short_is_fetched_again() {
    for manner in [Manner::Proper, Manner::Unlisted] {
        let cache = tempfile::tempdir().unwrap();
        let server = Server::start(&[("m.gguf", b"GGUF and more")]);
        server.behave(manner);
        let hub = server.hub(cache.path());
        let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(4).unwrap();
        drop(file);
        assert_eq!(hub.fetch(&id("owner/name"), &mut ()).unwrap(), path);
        assert_eq!(std::fs::read(&path).unwrap(), b"GGUF and more");
    }
}

#[test]
fn what_was_fetched_is_forgotten_with_the_file() {
    let cache = tempfile::tempdir().unwrap();
    let server = Server::start(&[("a-Q4_0.gguf", b"GGUF"), ("b-Q8_0.gguf", b"GGUF too")]);
    let hub = server.hub(cache.path());
    for file in ["a-Q4_0.gguf", "b-Q8_0.gguf"] {
        hub.fetch(&id(&format!("owner/name:{file}")), &mut ())
            .unwrap();
    }
    hub.remove(&id("owner/name:Q4_0")).unwrap();
    server.requests();
    let path = hub.fetch(&id("owner/name"), &mut ()).unwrap();
    assert!(path.ends_with("b-Q8_0.gguf"));
    assert!(
        server.requests().is_empty(),
        "the one that is left is whole"
    );
    hub.remove(&id("owner/name:Q8_0")).unwrap();
    assert_eq!(std::fs::read_dir(cache.path()).unwrap().count(), 0);
}
