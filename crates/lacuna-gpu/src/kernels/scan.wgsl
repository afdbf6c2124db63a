// Each token changes a matrix of its sequence for each head, and reads it: a workgroup for 16 columns of a head's, which
// stay in shared memory over the tokens of a segment, one after the other, so a prompt may be cut anywhere. Of a column
// eight threads have every eighth row each; their sums are added one after the other.

struct Params {
    queries: u32,     // word of the segment's first token
    keys: u32,
    values: u32,      // which become results
    decay: u32,       // what is left of a state at each token, for each head
    strength: u32,    // and how much of what a token adds counts
    tokens: u32,
    key_heads: u32,
    value_heads: u32,
    key_dim: u32,
    value_dim: u32,
    tiled: u32,       // 1: heads of values take turns with heads of keys, 0: the first ones have the first
    delta: u32,       // 1: what is added replaces what the key led to
    scale: f32,       // what results are multiplied by
    skip: u32,        // where how much of each head's values joins results begins in `vectors`, or NONE
    state: u32,       // word of the state in the window
    fresh: u32,       // 1: before the first token all states are zero, whatever is there
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;
@group(0) @binding(1) var<storage, read> vectors: array<f32>;

const THREADS = 128u;
const NONE = 0xffffffffu;
const PANEL = 16u;
const SLICES = 8u;
// The most rows of a state.
const MOST = 256u;

var<workgroup> panel: array<f32, 4096>;
var<workgroup> key: array<f32, MOST>;
var<workgroup> query: array<f32, MOST>;
var<workgroup> led: array<f32, THREADS>;
var<workgroup> seen: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn scan(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) place: vec3<u32>,
) {
    let column = thread % PANEL;
    let slice = thread / PANEL;
    let head = place.y;
    let element = place.x * PANEL + column;
    let within = element < p.value_dim;
    let panels = (p.value_dim + PANEL - 1u) / PANEL;
    let size = p.key_dim * PANEL;
    // For each head and 16 columns the rows of those, one after the other.
    let state = p.state + (head * panels + place.x) * size;
    for (var i = thread; i < size; i += THREADS) {
        var x = 0.0;
        if p.fresh == 0u {
            x = state_at(state + i);
        }
        panel[i] = x;
    }
    var key_head = head / (p.value_heads / p.key_heads);
    if p.tiled == 1u {
        key_head = head % p.key_heads;
    }
    var skip = 0.0;
    if p.skip != NONE {
        skip = vectors[p.skip + head];
    }
    for (var token = 0u; token < p.tokens; token++) {
        let keys = (token * p.key_heads + key_head) * p.key_dim;
        for (var i = thread; i < p.key_dim; i += THREADS) {
            key[i] = arena[p.keys + keys + i];
            query[i] = arena[p.queries + keys + i];
        }
        let gate = token * p.value_heads + head;
        let decay = arena[p.decay + gate];
        let strength = arena[p.strength + gate];
        let at = p.values + gate * p.value_dim + element;
        var value = 0.0;
        if within {
            value = arena[at];
        }
        workgroupBarrier();
        var added = value;
        if p.delta == 1u {
            var sum = 0.0;
            for (var row = slice; row < p.key_dim; row += SLICES) {
                sum = fma(key[row], panel[row * PANEL + column], sum);
            }
            led[thread] = sum;
            workgroupBarrier();
            var led_to = 0.0;
            for (var i = 0u; i < SLICES; i++) {
                led_to += led[i * PANEL + column];
            }
            added = value - decay * led_to;
        }
        added *= strength;
        var sum = 0.0;
        for (var row = slice; row < p.key_dim; row += SLICES) {
            let changed = fma(key[row], added, decay * panel[row * PANEL + column]);
            panel[row * PANEL + column] = changed;
            sum = fma(query[row], changed, sum);
        }
        seen[thread] = sum;
        workgroupBarrier();
        if slice == 0u && within {
            var result = 0.0;
            for (var i = 0u; i < SLICES; i++) {
                result += seen[i * PANEL + column];
            }
            arena[at] = fma(skip, value, result * p.scale);
        }
    }
    workgroupBarrier();
    for (var i = thread; i < size; i += THREADS) {
        keep_state(state + i, panel[i]);
    }
}
