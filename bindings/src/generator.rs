//! Writes the Swift, Kotlin or Python half from the built library; `.ci/test-bindings` shows how.

fn main() {
    uniffi::uniffi_bindgen_main();
}
