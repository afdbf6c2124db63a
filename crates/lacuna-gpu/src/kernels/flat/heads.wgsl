// New words of keys and of values go to where windows have them.

@group(0) @binding(2) var<storage, read_write> key_rows: array<u32>;
@group(0) @binding(3) var<storage, read_write> value_rows: array<u32>;

fn keep_key(at: u32, word: u32) {
    key_rows[at] = word;
}

fn keep_value(at: u32, word: u32) {
    value_rows[at] = word;
}
