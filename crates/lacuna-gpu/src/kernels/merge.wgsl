// Puts together what `attend` made of the partitions that a head of a token sees, in their order.

struct Params {
    states: u32,           // word of the first state
    output: u32,           // word of the first head of the segment's first token
    query_heads: u32,
    value_dim: u32,
    mask: u32,             // as `attend` has it
    reach: u32,
    position: u32,
    first_token: u32,
    base_partition: u32,
    partitions: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;

const THREADS = 128u;
const PARTITION = 256u;

@compute @workgroup_size(THREADS)
fn merge(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) place: vec3<u32>,
) {
    let token = p.first_token + place.y;
    let own = p.position + token;
    var first = 0u;
    if p.mask == 1u && own + 1u > p.reach {
        first = own + 1u - p.reach;
    }
    if p.mask == 2u {
        first = own / p.reach * p.reach;
    }
    let start = first / PARTITION - p.base_partition;
    let end = own / PARTITION - p.base_partition;
    let size = p.value_dim + 2u;
    let states = p.states + (place.y * p.query_heads + place.x) * p.partitions * size;
    var largest = -3.0e38;
    for (var part = start; part <= end; part++) {
        largest = max(largest, arena[states + part * size]);
    }
    var sum = 0.0;
    for (var part = start; part <= end; part++) {
        let state = states + part * size;
        sum += exp(arena[state] - largest) * arena[state + 1u];
    }
    let output = p.output + (token * p.query_heads + place.x) * p.value_dim;
    for (var i = thread; i < p.value_dim; i += THREADS) {
        var weighed = 0.0;
        for (var part = start; part <= end; part++) {
            let state = states + part * size;
            weighed += exp(arena[state] - largest) * arena[state + 2u + i];
        }
        arena[output + i] = weighed / sum;
    }
}
