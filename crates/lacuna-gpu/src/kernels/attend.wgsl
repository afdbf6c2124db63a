// Attention of one head of one token over one partition of 256 rows: the largest score, the sum of
// e^(score - largest), and the sum of the values so weighed. `merge` puts the partitions of a token together.
//
// Partitions begin at multiples of 256 rows of the sequence, so what is in one, and in which order it is
// added, does not depend on how a prompt was cut. Rows that the mask hides are not touched: there may be
// no memory behind them.

struct Params {
    queries: u32,          // word of the first head of the segment's first token
    states: u32,           // word of the first state
    query_heads: u32,
    group: u32,            // query heads to a head of keys
    key_dim: u32,
    value_dim: u32,
    scale: f32,
    soft_cap: f32,         // 0: none
    mask: u32,             // 0: all rows up to its own, 1: a window of `reach` rows, 2: chunks of `reach` rows
    reach: u32,
    position: u32,         // of the segment's first token
    first_token: u32,      // of the group, in the segment
    first_partition: u32,  // of those that are computed
    base_partition: u32,   // the first that states have room for
    partitions: u32,       // that states have room for, of each head
    first_row: u32,        // the first row of the windows
    key_skip: u32,         // words in the window before it
    key_stride: u32,       // words from row to row
    value_skip: u32,
    value_stride: u32,
    elements: u32,         // of keys, and those of values times 4. 0: f32, 1: f16, 2: bf16, 3: q8_0
    ahead: u32,            // behind the last row that all tokens see, or 0: each sees those up to its own
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;
@group(0) @binding(1) var<storage, read> keys: array<u32>;
@group(0) @binding(2) var<storage, read> values: array<u32>;

const THREADS = 128u;
// The longest head there is.
const MOST = 576u;

var<workgroup> query: array<f32, MOST>;
var<workgroup> weights: array<f32, PARTITION>;
var<workgroup> tree: array<f32, THREADS>;

fn capped(score: f32) -> f32 {
    if p.soft_cap == 0.0 {
        return score;
    }
    // tanh by an exponential that does not overflow.
    let x = score / p.soft_cap;
    let power = exp(-2.0 * abs(x));
    return sign(x) * p.soft_cap * ((1.0 - power) / (1.0 + power));
}

@compute @workgroup_size(THREADS)
fn attend(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) place: vec3<u32>,
) {
    let token = p.first_token + place.z;
    let own = p.position + token;
    let part = p.first_partition + place.y;
    let start = max(first_row(own), part * PARTITION);
    let end = min(seen_to(own), (part + 1u) * PARTITION);
    if start >= end {
        return;
    }
    let rows = end - start;
    let head = place.x / p.group;
    for (var i = thread; i < p.key_dim; i += THREADS) {
        query[i] = arena[p.queries + (token * p.query_heads + place.x) * p.key_dim + i];
    }
    workgroupBarrier();
    make_ready(thread);
    // Below every score that is finite.
    var largest = -3.0e38;
    for (var i = thread; i < rows; i += THREADS) {
        let found = capped(score(start + i, head) * p.scale);
        weights[i] = found;
        largest = max(largest, found);
    }
    tree[thread] = largest;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            tree[thread] = max(tree[thread], tree[thread + half]);
        }
        workgroupBarrier();
    }
    largest = tree[0];
    workgroupBarrier();
    var sum = 0.0;
    for (var i = thread; i < rows; i += THREADS) {
        let weight = exp(weights[i] - largest);
        weights[i] = weight;
        sum += weight;
    }
    tree[thread] = sum;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            tree[thread] += tree[thread + half];
        }
        workgroupBarrier();
    }
    let index = (place.z * p.query_heads + place.x) * p.partitions + part - p.base_partition;
    let state = p.states + index * (p.value_dim + 2u);
    if thread == 0u {
        arena[state] = largest;
        arena[state + 1u] = tree[0];
    }
    for (var i = thread; i < p.value_dim; i += THREADS) {
        var weighed = 0.0;
        for (var row = 0u; row < rows; row++) {
            weighed += weights[row] * value(start + row, head, i);
        }
        arena[state + 2u + i] = weighed;
    }
}
