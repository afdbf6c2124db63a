//! Who is let in.

use std::net::{Ipv4Addr, SocketAddr};

use lacuna_server::{ApiKeys, Server, StartError};
use serde_json::json;

use crate::support::{CHAT, config, get, model, question, raw, request, start, start_with};

fn status(server: &Server, path: &str, headers: &[(&str, &str)]) -> u16 {
    raw(server, &request("GET", path, headers, b"")).status
}

#[test]
fn with_keys_only_those_who_have_one_come_in() {
    let keys = || ApiKeys::new(["first".to_owned(), "second".to_owned()]);
    let server = start_with(|config| config.keys = keys());
    for path in ["/v1/models", "/metrics", "/memory", "/nowhere"] {
        let refused = get(&server, path);
        assert_eq!(refused.status, 401, "{path}");
        assert_eq!(refused.json()["error"]["code"], "invalid_api_key");
        assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
        for wrong in [
            "Bearer wrong",
            "Bearer ",
            "Basic first",
            "first",
            "Bearer firs",
        ] {
            assert_eq!(
                status(&server, path, &[("authorization", wrong)]),
                401,
                "{wrong}"
            );
        }
    }
    let body = question(json!({"max_tokens": 1})).to_string();
    let asked = |headers: &[(&str, &str)]| {
        raw(&server, &request("POST", CHAT, headers, body.as_bytes())).status
    };
    assert_eq!(asked(&[]), 401);
    assert_eq!(asked(&[("authorization", "Bearer first")]), 200);
    assert_eq!(asked(&[("authorization", "bearer second")]), 200);
    assert_eq!(get(&server, "/health").status, 200);
    assert_eq!(get(&server, "/").status, 200);
}

#[test]
fn an_address_others_reach_needs_a_key() {
    let open = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
    let mut without = config();
    without.address = open;
    let refused = Server::start(model(), without).expect_err("open to all");
    assert!(matches!(refused, StartError::OpenToAll { .. }), "{refused}");
    let server = start_with(|config| {
        config.address = open;
        config.keys = ApiKeys::new(["key".to_owned()]);
    });
    let port = server.address().port().to_string();
    assert_ne!(port, "0");
}

#[test]
fn pages_of_other_sites_are_kept_out() {
    let server = start();
    assert_eq!(
        status(&server, "/health", &[("host", "localhost:8080")]),
        200
    );
    assert_eq!(
        status(&server, "/health", &[("host", "127.0.0.1:8080")]),
        200
    );
    assert_eq!(status(&server, "/health", &[("host", "evil.example")]), 403);
    let own = [("host", "localhost:1"), ("origin", "http://localhost:1")];
    assert_eq!(status(&server, "/health", &own), 200);
    for origin in ["http://evil.example", "null", "http://localhost:2"] {
        let headers = [("host", "localhost:1"), ("origin", origin)];
        let refused = raw(&server, &request("GET", "/health", &headers, b""));
        assert_eq!(refused.status, 403, "{origin}");
        assert!(refused.header("access-control-allow-origin").is_none());
    }
}

#[test]
fn an_address_in_use_is_said_to_be() {
    let server = start();
    let mut second = config();
    second.address = server.address();
    let refused = Server::start(model(), second).expect_err("in use");
    assert!(matches!(refused, StartError::Listen { .. }), "{refused}");
    assert!(refused.to_string().contains(&server.address().to_string()));
}
