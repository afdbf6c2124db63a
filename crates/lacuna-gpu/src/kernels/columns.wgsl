// Some columns of rows of heads to those of others, a thread for each element.

struct Params {
    source: u32,       // word of the first column of the first row
    to: u32,
    source_token: u32, // words from a token's row of a head to the next token's
    source_head: u32,  // and to the next head's
    to_token: u32,
    to_head: u32,
    heads: u32,
    columns: u32,
    count: u32,        // elements of all heads of all tokens
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;

const THREADS = 128u;

@compute @workgroup_size(THREADS)
fn columns(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = (group.y * groups.x + group.x) * THREADS + thread;
    if number >= p.count {
        return;
    }
    let column = number % p.columns;
    let head = number / p.columns % p.heads;
    let token = number / p.columns / p.heads;
    let source = p.source + token * p.source_token + head * p.source_head + column;
    arena[p.to + token * p.to_token + head * p.to_head + column] = arena[source];
}
