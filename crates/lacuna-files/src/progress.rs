//! Progress of long operations, told to whoever can show it.

/// Receives the progress of downloading or writing files, one item at a time.
///
/// Libraries do not print; the command line implements this with a progress bar, and `()` ignores
/// it.
pub trait Progress {
    /// An item of `total` bytes begins; `total` is `None` when nobody knows.
    fn begin(&mut self, item: &str, total: Option<u64>);

    /// `bytes` more of the current item are done.
    fn advance(&mut self, bytes: u64);

    /// The current item is complete.
    fn finish(&mut self);
}

impl Progress for () {
    fn begin(&mut self, _item: &str, _total: Option<u64>) {}

    fn advance(&mut self, _bytes: u64) {}

    fn finish(&mut self) {}
}
