//! The same over TLS: replies, streams, clients that are gone, and files that are wrong or renewed.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;

use lacuna_server::{Server, Tls, TlsError};
use rustls::pki_types::CertificateDer;
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use serde_json::json;
use tempfile::TempDir;

use crate::support::{
    CHAT, assert_nothing_held, connect, posted, question, read, request, start, start_with, until,
};

type Stream = StreamOwned<ClientConnection, TcpStream>;

/// A certificate for `localhost`, in files.
struct Certificate {
    folder: TempDir,
    der: CertificateDer<'static>,
}

impl Certificate {
    fn new() -> Self {
        let mut made = Self {
            folder: tempfile::tempdir().expect("a folder"),
            der: CertificateDer::from(Vec::new()),
        };
        made.renew();
        made
    }

    /// Puts another in its place.
    fn renew(&mut self) {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]);
        let made = made.expect("a certificate");
        fs::write(self.path("certificate"), made.cert.pem()).expect("written");
        fs::write(self.path("key"), made.signing_key.serialize_pem()).expect("written");
        self.der = made.cert.der().clone();
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn tls(&self) -> Result<Tls, TlsError> {
        Tls::from_files(&self.path("certificate"), &self.path("key"))
    }

    /// A client that believes this certificate and no other.
    fn connect(&self, server: &Server) -> Stream {
        let mut roots = RootCertStore::empty();
        roots.add(self.der.clone()).expect("a certificate");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = "localhost".try_into().expect("a name");
        let client = ClientConnection::new(Arc::new(config), name).expect("a client");
        StreamOwned::new(client, connect(server))
    }

    fn asked(&self, server: &Server, request: &[u8]) -> Stream {
        let mut stream = self.connect(server);
        stream.write_all(request).expect("sent");
        stream
    }
}

fn started(certificate: &Certificate) -> Server {
    let tls = certificate.tls().expect("files that fit");
    start_with(|config| {
        config.tls = Some(tls);
        config.service.prefix_cache.enabled = false;
    })
}

#[test]
fn replies_are_those_of_a_server_without_it() {
    let certificate = Certificate::new();
    let server = started(&certificate);
    let plain = start();
    let mut body = question(json!({"max_tokens": 40}));
    let expected = posted(&plain, CHAT, &body)["choices"].take();
    let whole = request("POST", CHAT, &[], body.to_string().as_bytes());
    let reply = read(&mut certificate.asked(&server, &whole));
    assert_eq!(reply.json()["choices"], expected);
    body["stream"] = json!(true);
    let streamed = request("POST", CHAT, &[], body.to_string().as_bytes());
    let events = read(&mut certificate.asked(&server, &streamed)).events();
    let content = |event: &serde_json::Value| {
        let content = event.pointer("/choices/0/delta/content")?;
        content.as_str().map(str::to_owned)
    };
    let text: String = events.iter().filter_map(content).collect();
    assert_eq!(expected[0]["message"]["content"], text);
}

#[test]
fn bodies_and_replies_of_many_records_arrive_whole() {
    let certificate = Certificate::new();
    let server = started(&certificate);
    // Longer than what is received or sent at a time.
    let text = "a word and ".repeat(20_000);
    let body = json!({"prompt": text}).to_string();
    let last = request("POST", "/tokenize", &[], body.as_bytes());
    let plain = start();
    let expected = crate::support::raw(&plain, &last);
    assert_eq!(expected.status, 200, "{expected:?}");
    assert!(expected.body.len() > 1 << 17);
    let reply = read(&mut certificate.asked(&server, &last));
    assert_eq!((reply.status, reply.body), (200, expected.body));
}

#[test]
fn a_client_that_finishes_sending_gets_all_of_its_stream_and_a_comment() {
    let certificate = Certificate::new();
    let server = started(&certificate);
    for with_farewell in [true, false] {
        let mut lines = begun(&certificate, &server);
        let stream = lines.get_mut();
        if with_farewell {
            stream.conn.send_close_notify();
            stream.conn.write_tls(&mut stream.sock).expect("sent");
        }
        stream.sock.shutdown(Shutdown::Write).expect("half closed");
        let mut rest = String::new();
        lines.read_to_string(&mut rest).expect("to the end");
        assert!(rest.contains("data: [DONE]"), "{rest}");
        assert_eq!(rest.matches("\r\n3\r\n:\n\n\r\n").count(), 1, "{rest}");
        assert!(rest.ends_with("0\r\n\r\n"), "{rest}");
    }
    assert_nothing_held(&server);
}

/// A stream of which the first event has come.
fn begun(certificate: &Certificate, server: &Server) -> BufReader<Stream> {
    let body = question(json!({"stream": true, "max_tokens": 300, "ignore_eos": true}));
    let bytes = request("POST", CHAT, &[], body.to_string().as_bytes());
    let mut lines = BufReader::new(certificate.asked(server, &bytes));
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(lines.read_line(&mut line).expect("a line") > 0);
    }
    lines
}

#[test]
fn a_client_that_goes_away_is_cancelled() {
    let certificate = Certificate::new();
    let server = started(&certificate);
    let engine = server.engine();
    drop(begun(&certificate, &server));
    assert_nothing_held(&server);
    assert_eq!(engine.status().counters.cancelled, 1);
    // Before its reply has begun.
    let body = question(json!({"max_tokens": 900, "ignore_eos": true, "n": 4}));
    let bytes = request("POST", CHAT, &[], body.to_string().as_bytes());
    let mut stream = certificate.asked(&server, &bytes);
    until("it runs", || !engine.status().sessions.is_empty());
    stream.conn.send_close_notify();
    stream.conn.write_tls(&mut stream.sock).expect("sent");
    drop(stream);
    assert_nothing_held(&server);
    assert_eq!(engine.status().counters.cancelled, 2);
}

#[test]
fn whoever_does_not_speak_it_is_let_go_and_others_are_served() {
    let certificate = Certificate::new();
    let server = started(&certificate);
    let hello = {
        let mut stream = certificate.connect(&server);
        let mut bytes = Vec::new();
        stream.conn.write_tls(&mut bytes).expect("a greeting");
        bytes
    };
    let halves: Vec<TcpStream> = (0..4)
        .map(|_| {
            let mut stream = connect(&server);
            stream.write_all(&hello[..hello.len() / 2]).expect("sent");
            stream
        })
        .collect();
    for noise in [
        request("GET", "/health", &[], b""),
        vec![0; 1 << 16],
        [hello.as_slice(), &[23, 3, 3, 0, 32], &[0; 32]].concat(),
    ] {
        let mut stream = connect(&server);
        stream.write_all(&noise).ok();
        let mut answer = Vec::new();
        // An alert, or a reset with what it did not read.
        stream.read_to_end(&mut answer).ok();
        assert!(
            !answer.starts_with(b"HTTP"),
            "nothing is answered in the clear"
        );
    }
    // Another's certificate is not believed, which is the client's to say.
    let stranger = Certificate::new();
    stranger
        .connect(&server)
        .write_all(b"GET")
        .expect_err("refused");
    let health = request("GET", "/health", &[], b"");
    assert_eq!(read(&mut certificate.asked(&server, &health)).status, 200);
    drop(halves);
}

#[test]
fn a_renewed_certificate_is_shown_once_it_is_read_and_a_broken_one_is_not() {
    let mut certificate = Certificate::new();
    let tls = certificate.tls().expect("files that fit");
    let server = start_with(|config| config.tls = Some(tls.clone()));
    let health = request("GET", "/health", &[], b"");
    certificate.renew();
    certificate
        .connect(&server)
        .write_all(&health)
        .expect_err("the old one is still shown");
    tls.reload().expect("files that fit");
    assert_eq!(read(&mut certificate.asked(&server, &health)).status, 200);
    fs::write(certificate.path("certificate"), "none").expect("written");
    tls.reload().expect_err("no certificate");
    assert_eq!(read(&mut certificate.asked(&server, &health)).status, 200);
}

#[test]
fn files_that_are_wrong_are_named() {
    let (one, other) = (Certificate::new(), Certificate::new());
    let error = |certificates: PathBuf, key: PathBuf| {
        let error = Tls::from_files(&certificates, &key).expect_err("wrong files");
        error.to_string()
    };
    let (certificate, key) = (one.path("certificate"), one.path("key"));
    let absent = one.path("absent");
    let unreadable = error(absent.clone(), key.clone());
    assert!(unreadable.contains("absent"), "{unreadable}");
    let swapped = error(key.clone(), certificate.clone());
    assert!(swapped.contains("has no certificate"), "{swapped}");
    let no_key = error(certificate.clone(), certificate.clone());
    assert!(no_key.contains("has no private key"), "{no_key}");
    let others = error(certificate, other.path("key"));
    assert!(others.contains("cannot be used with the key"), "{others}");
}
