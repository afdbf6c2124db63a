//! Stores behind cache folders.

mod conformance;

use lacuna_kv::folder::remote::MemoryStore;

#[test]
fn memory_is_a_store() {
    conformance::check(&MemoryStore::default());
}
