// New words of rows go to where the window has them.

@group(0) @binding(1) var<storage, read_write> rows: array<u32>;

fn keep(at: u32, word: u32) {
    rows[at] = word;
}
