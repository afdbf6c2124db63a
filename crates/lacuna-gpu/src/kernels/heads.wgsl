// What is made of new queries, keys and values before attention, a workgroup for each head: those of queries and
// keys are normed and turned by position as far as that is asked for, and keys and values go to the sequence's
// buffers. Sums are made as in `norm`.

struct Params {
    queries: u32,       // word of the first head of the segment's first token
    keys: u32,
    values: u32,
    table: u32,         // word of the first token's cosines
    query_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    norms: u32,         // 1: heads are normed
    query_weight: u32,  // where weights begin in `vectors`, or NONE
    key_weight: u32,
    epsilon: f32,
    pairs: u32,         // pairs of a head that turn
    apart: u32,         // from the first of a pair to the second
    step: u32,          // from the first of a pair to that of the next
    position: u32,      // word that has the position of the segment's first token
    first_row: u32,     // the window's first row
    key_to: u32,        // word of that row in the window
    key_stride: u32,    // words from one row of the window to the next
    value_to: u32,
    value_stride: u32,
    elements: u32,      // of keys, and those of values times 4. 0: f32, 1: f16, 2: bf16
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;
@group(0) @binding(1) var<storage, read> vectors: array<f32>;

const THREADS = 128u;
const NONE = 0xffffffffu;
// The longest head there is.
const MOST = 576u;

var<workgroup> head: array<f32, MOST>;
var<workgroup> sums: array<f32, THREADS>;

fn norm(thread: u32, weight: u32) {
    var sum = 0.0;
    for (var i = thread; i < p.head_dim; i += THREADS) {
        sum += head[i] * head[i];
    }
    sums[thread] = sum;
    workgroupBarrier();
    for (var half = THREADS / 2u; half > 0u; half /= 2u) {
        if thread < half {
            sums[thread] += sums[thread + half];
        }
        workgroupBarrier();
    }
    let scale = 1.0 / sqrt(sums[0] / f32(p.head_dim) + p.epsilon);
    for (var i = thread; i < p.head_dim; i += THREADS) {
        var y = head[i] * scale;
        if weight != NONE {
            y *= vectors[weight + i];
        }
        head[i] = y;
    }
    workgroupBarrier();
}

fn turn(thread: u32, token: u32) {
    for (var pair = thread; pair < p.pairs; pair += THREADS) {
        let angles = p.table + token * 2u * p.pairs + pair;
        let cosine = arena[angles];
        let sine = arena[angles + p.pairs];
        let at = pair * p.step;
        let first = head[at];
        let second = head[at + p.apart];
        head[at] = first * cosine - second * sine;
        head[at + p.apart] = second * cosine + first * sine;
    }
    workgroupBarrier();
}

// A word of the head as elements of a kind.
fn word(i: u32, element: u32) -> u32 {
    if element == 0u {
        return bitcast<u32>(head[i]);
    }
    let first = bitcast<u32>(head[2u * i]);
    let second = bitcast<u32>(head[2u * i + 1u]);
    if element == 1u {
        return to_f16(first) | (to_f16(second) << 16u);
    }
    return to_bf16(first) | (to_bf16(second) << 16u);
}

// A token's row in the window.
fn row_of(token: u32) -> u32 {
    return bitcast<u32>(arena[p.position]) + token - p.first_row;
}

// Words that a head takes as elements of a kind.
fn words(element: u32) -> u32 {
    if element == 0u {
        return p.head_dim;
    }
    return p.head_dim / 2u;
}

@compute @workgroup_size(THREADS)
fn heads(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) place: vec3<u32>,
) {
    let token = place.y;
    let is_query = place.x < p.query_heads;
    let is_key = !is_query && place.x < p.query_heads + p.kv_heads;
    var source = p.queries + (token * p.query_heads + place.x) * p.head_dim;
    var number = place.x - p.query_heads;
    if is_key {
        source = p.keys + (token * p.kv_heads + number) * p.head_dim;
    } else if !is_query {
        number -= p.kv_heads;
        source = p.values + (token * p.kv_heads + number) * p.head_dim;
    }
    for (var i = thread; i < p.head_dim; i += THREADS) {
        head[i] = arena[source + i];
    }
    workgroupBarrier();
    if is_query || is_key {
        if p.norms == 1u {
            norm(thread, select(p.key_weight, p.query_weight, is_query));
        }
        turn(thread, token);
    }
    if is_query {
        for (var i = thread; i < p.head_dim; i += THREADS) {
            arena[source + i] = head[i];
        }
    } else if is_key {
        let element = p.elements % 4u;
        let to = p.key_to + row_of(token) * p.key_stride + number * words(element);
        for (var i = thread; i < words(element); i += THREADS) {
            keep_key(to + i, word(i, element));
        }
    } else {
        let element = p.elements / 4u;
        let to = p.value_to + row_of(token) * p.value_stride + number * words(element);
        for (var i = thread; i < words(element); i += THREADS) {
            keep_value(to + i, word(i, element));
        }
    }
}
