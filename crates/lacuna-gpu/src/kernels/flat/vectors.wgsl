// Vectors of keys and of values, by their numbers from where windows begin.

@group(0) @binding(1) var<storage, read> keys: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> values: array<vec4<u32>>;

fn key_vector(at: u32) -> vec4<u32> {
    return keys[at];
}

fn value_vector(at: u32) -> vec4<u32> {
    return values[at];
}
