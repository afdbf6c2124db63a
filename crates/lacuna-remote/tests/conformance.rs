//! Stores of services do what stores in memory do.

use std::collections::BTreeMap;

#[path = "../../lacuna-kv/tests/remote/conformance.rs"]
mod conformance;

#[test]
fn folders_are_stores() {
    let folder = tempfile::tempdir().expect("a folder");
    let address = format!("fs://{}", folder.path().display());
    let store = lacuna_remote::open_with(&address, BTreeMap::new()).expect("a store");
    conformance::check(&*store);
    assert!(store.can_write());
    assert_eq!(store.place(), address);
}

#[test]
fn memory_is_a_store() {
    let store = lacuna_remote::open_with("memory://", BTreeMap::new()).expect("a store");
    conformance::check(&*store);
}

/// `.ci/test-remote` starts servers and says where they are.
#[test]
#[ignore = "needs servers, which .ci/test-remote starts"]
fn servers_are_stores() {
    let addresses = std::env::var("LACUNA_TEST_STORES").expect("addresses");
    for address in addresses.split(' ') {
        let store = lacuna_remote::open(address).expect("a store");
        conformance::check(&*store);
    }
}

#[test]
fn stores_that_are_read_only_say_so_and_servers_that_are_not_there_are_errors() {
    // Nobody listens on the port for discarding bytes.
    let store = lacuna_remote::open_with("http://127.0.0.1:9/kv", BTreeMap::new());
    let store = store.expect("nothing is asked yet");
    assert!(!store.can_write());
    let error = store
        .lengths(&["a/b".to_owned()])
        .expect_err("nobody is there");
    assert!(error.to_string().contains("send http request"), "{error}");
    assert!(store.get("a/b", &mut Vec::new()).is_err());
    assert!(store.put("a/b", 1, &mut &b"a"[..]).is_err());
}
