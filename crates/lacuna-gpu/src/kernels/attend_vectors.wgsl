// What `attend` takes of rows that are read by the vector.

fn make_ready(thread: u32) {}

// Four more elements of keys.
fn four_more(sums: vec4<f32>, key: vec4<f32>, query: u32) -> vec4<f32> {
    let two = fma(vec4<f32>(key.y), space[query + 1u], fma(vec4<f32>(key.x), space[query], sums));
    return fma(vec4<f32>(key.w), space[query + 3u], fma(vec4<f32>(key.z), space[query + 2u], two));
}

// Partial scores of the workgroup's query rows for one split of a row.
fn scores_of(row: u32, head: u32, split: u32) -> vec4<f32> {
    let first = split * p.split;
    let end = min(first + p.split, p.key_dim);
    var sums = vec4<f32>();
    for (var i = first; i < end; i += 8u) {
        let key = keys_of(row, head, i);
        sums = four_more(sums, key.low, i + split);
        if i + 4u < end {
            sums = four_more(sums, key.high, i + 4u + split);
        }
    }
    return sums;
}
