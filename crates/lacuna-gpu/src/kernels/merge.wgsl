// Puts together what `attend` made of the partitions that a head of a token sees, in their order: a thread for
// every four elements of a token's heads. What comes out is quantized if that is asked for.

struct Params {
    states: u32,           // word of the first state
    output: u32,           // word of the first head of the segment's first token, or NONE
    query_heads: u32,
    value_dim: u32,
    mask: u32,             // as `attend` has it
    reach: u32,
    position: u32,
    offset: u32,
    first_token: u32,
    base_partition: u32,
    partitions: u32,
    first_block: u32,      // of the segment's first token, among those of all rows
    bytes: u32,            // where bytes go, in words, or NONE
    scales: u32,
    sums: u32,
    ahead: u32,            // as `attend` has it
    merged: u32,           // whether the partitions are one already
    sinks: u32,            // where the logit of each head that takes its share begins in `vectors`, or NONE
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;
@group(0) @binding(1) var<storage, read> vectors: array<f32>;

const THREADS = 128u;
const NONE = 0xffffffffu;

fn put(word: u32, value: u32) {
    arena[word] = bitcast<f32>(value);
}

// What attention made of one partition, with the four elements from `element` on; what is beyond a head is not written.
fn partial_of(state: u32, element: u32) -> Partial {
    let at = state + 2u + element;
    let weighed = vec4<f32>(arena[at], arena[at + 1u], arena[at + 2u], arena[at + 3u]);
    return Partial(arena[state], arena[state + 1u], weighed);
}

@compute @workgroup_size(THREADS)
fn merge(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) place: vec3<u32>,
) {
    let fours = (p.value_dim + 3u) / 4u;
    let number = place.x * THREADS + thread;
    let within = number < p.query_heads * fours;
    let head = number / fours;
    let element = number % fours * 4u;
    let token = p.first_token + place.y;
    var merged = vec4<f32>();
    if within {
        let own = bitcast<u32>(arena[p.position]) + p.offset + token;
        var start = 0u;
        var end = 0u;
        if p.merged == 0u {
            start = first_row(own) / PARTITION - p.base_partition;
            end = (seen_to(own) - 1u) / PARTITION - p.base_partition;
        }
        let size = p.value_dim + 2u;
        let states = p.states + (place.y * p.query_heads + head) * p.partitions * size;
        var partial = NOTHING;
        // Four at a time, which are asked for together.
        for (var part = start; part <= end; part += 4u) {
            let first = partial_of(states + part * size, element);
            let second = partial_of(states + min(part + 1u, end) * size, element);
            let third = partial_of(states + min(part + 2u, end) * size, element);
            let fourth = partial_of(states + min(part + 3u, end) * size, element);
            partial = join(partial, first);
            if part + 1u <= end {
                partial = join(partial, second);
            }
            if part + 2u <= end {
                partial = join(partial, third);
            }
            if part + 3u <= end {
                partial = join(partial, fourth);
            }
        }
        if p.sinks != NONE {
            partial = join(partial, Partial(vectors[p.sinks + head], 1.0, vec4<f32>()));
        }
        merged = partial.weighed / partial.sum;
        if p.output != NONE {
            let to = p.output + (token * p.query_heads + head) * p.value_dim + element;
            for (var i = 0u; i < min(p.value_dim - element, 4u); i++) {
                arena[to + i] = merged[i];
            }
        }
    }
    if p.bytes != NONE {
        let row = p.query_heads * fours;
        quantize_four(thread, merged, p.first_block * 8u + token * row + number, within);
    }
}
