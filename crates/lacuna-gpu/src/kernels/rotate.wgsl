// Heads turned by position, a thread for each pair of elements. The table has cosines, then sines, of each token.

struct Params {
    rows: u32,       // word of the first head of the first token
    table: u32,      // word of the first token's cosines
    heads: u32,
    head_dim: u32,
    pairs: u32,      // pairs of a head that turn
    apart: u32,      // from the first of a pair to the second
    step: u32,       // from the first of a pair to that of the next
    count: u32,      // pairs of all heads
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;

@compute @workgroup_size(128)
fn rotate(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = (group.y * groups.x + group.x) * 128u + thread;
    if number >= p.count {
        return;
    }
    let pair = number % p.pairs;
    let head = number / p.pairs;
    let angles = p.table + head / p.heads * 2u * p.pairs + pair;
    let cosine = arena[angles];
    let sine = arena[angles + p.pairs];
    let at = p.rows + head * p.head_dim + pair * p.step;
    let first = arena[at];
    let second = arena[at + p.apart];
    arena[at] = first * cosine - second * sine;
    arena[at + p.apart] = second * cosine + first * sine;
}
