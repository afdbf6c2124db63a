// Nothing that threads share is needed to say what weights are.
fn begin(thread: u32) {}
