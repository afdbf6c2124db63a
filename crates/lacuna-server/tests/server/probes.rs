//! What asks whether the server lives has its own way in.

use std::io::Write;
use std::net::{SocketAddr, TcpStream};

use serde_json::json;

use crate::streams::begun;
use crate::support::{
    CHAT, Response, connect_to, get, question, read, request, start, start_with, until,
};

fn asked(address: SocketAddr, bytes: &[u8]) -> Response {
    let mut stream = connect_to(address);
    stream.write_all(bytes).expect("sent");
    read(&mut stream)
}

fn probe(address: SocketAddr, path: &str) -> Response {
    asked(address, &request("GET", path, &[], b""))
}

/// Lets this process, which is both ends of every connection, have `wanted` of them and other files,
/// or as many as it may.
fn connections(wanted: usize) -> usize {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let files = 4 * wanted as u64;
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < files) {
        limit.current = Some(limit.maximum.map_or(files, |most| most.min(files)));
        setrlimit(Resource::Nofile, limit).expect("up to the hard limit");
    }
    let allowed = getrlimit(Resource::Nofile).current.unwrap_or(files);
    wanted.min(allowed as usize / 4)
}

#[test]
fn a_flood_of_idle_connections_leaves_probes_their_way_in() {
    let places = connections(1024);
    let server = start_with(|config| config.limits.connections = places);
    let address = server.address();
    // More than there are places and spare ones.
    let idle: Vec<TcpStream> = (0..places + 80).map(|_| connect_to(address)).collect();
    for _ in 0..40 {
        for path in ["/health", "/ready", "/metrics"] {
            assert_eq!(probe(address, path).status, 200, "{path}");
        }
        let body = question(json!({})).to_string();
        let others = asked(address, &request("POST", CHAT, &[], body.as_bytes()));
        assert_eq!(others.status, 503);
        assert_eq!(others.json()["error"]["code"], "too_many_connections");
        assert!(others.header("retry-after").is_some());
    }
    drop(idle);
    until("there are places again", || {
        get(&server, "/v1/models").status == 200
    });
}

#[test]
fn a_probe_on_a_spare_place_needs_a_key_where_others_do() {
    let server = start_with(|config| {
        config.limits.connections = 1;
        config.keys = lacuna_server::ApiKeys::new(["first-key"]).expect("a key");
    });
    let _taken = connect_to(server.address());
    assert_eq!(probe(server.address(), "/health").status, 200);
    assert_eq!(probe(server.address(), "/metrics").status, 401);
    assert_eq!(probe(server.address(), "/v1/models").status, 401);
}

#[test]
fn a_server_that_is_ending_is_alive_but_not_ready() {
    let server = start();
    let address = server.address();
    assert_eq!(probe(address, "/ready").json()["status"], "ready");
    let stream = begun(&server, 900);
    let ending = std::thread::spawn(move || server.shutdown());
    // It used to stop listening at once, which is what a dead one looks like, and later to close what
    // had come a moment before without a reply.
    until("it is not ready", || probe(address, "/ready").status == 503);
    assert_eq!(
        probe(address, "/ready").json()["error"]["code"],
        "shutting_down"
    );
    assert_eq!(probe(address, "/health").status, 200);
    let refused = probe(address, "/v1/models");
    assert_eq!(refused.status, 503);
    assert_eq!(refused.json()["error"]["code"], "shutting_down");
    drop(stream);
    ending.join().expect("it ends");
    assert!(
        TcpStream::connect(address).is_err(),
        "nobody listens any more"
    );
}
