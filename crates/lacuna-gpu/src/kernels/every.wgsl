// Every token has every expert, in order: what workgroups of products have then, where `bands` would find out. The places of
// an expert are the tokens, and rows lie by place.

struct Params {
    tokens: u32,
    experts: u32,
    tiles: u32,  // word of what workgroups have: expert, first place, how many, and nothing
    most: u32,   // workgroups
    size: u32,   // tokens of one at most
    order: u32,  // word of the row of each place
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<u32>;

const THREADS = 128u;

@compute @workgroup_size(THREADS)
fn every(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let number = (group.y * groups.x + group.x) * THREADS + thread;
    if number < p.most {
        let each = (p.tokens + p.size - 1u) / p.size;
        let expert = number / each;
        let first = number % each * p.size;
        let tile = p.tiles + 4u * number;
        arena[tile] = expert;
        arena[tile + 1u] = expert * p.tokens + first;
        arena[tile + 2u] = select(0u, min(p.tokens - first, p.size), expert < p.experts);
    }
    if number < p.tokens * p.experts {
        arena[p.order + number] = number;
    }
}
