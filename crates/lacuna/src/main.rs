//! lacuna
fn main() {}
