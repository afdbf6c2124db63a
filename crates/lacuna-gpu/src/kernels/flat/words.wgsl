// Words of keys and of values, by their numbers from where windows begin.

@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read> values: array<u32>;

fn key_word(at: u32) -> u32 {
    return keys[at];
}

fn value_word(at: u32) -> u32 {
    return values[at];
}
