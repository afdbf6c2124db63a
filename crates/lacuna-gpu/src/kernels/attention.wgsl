// What kernels of attention have in common: what they are told, and what a score is.
//
// Each makes, of a head of a token and a partition of PARTITION rows, the largest score, the sum of e^(score - largest), and
// the sum of the values so weighed. `merge` puts the partitions of a token together, unless that was done. Partitions begin at multiples of
// PARTITION rows of the sequence, and within one the order of sums is that of `attend.wgsl` in all kernels, so what comes out
// does not depend on how a prompt was cut, nor on what else is in the batch. Rows that the mask hides from all tokens of a
// workgroup are not touched: there may be no memory behind them.
//
// A query row is one head of one token: those of the tokens that share a head of keys are numbered one token after the other.

struct Params {
    queries: u32,          // word of the first head of the run's first token
    states: u32,           // word of the first state
    query_heads: u32,
    group: u32,            // query heads to a head of keys
    key_dim: u32,
    value_dim: u32,
    scale: f32,
    soft_cap: f32,         // 0: none
    mask: u32,             // 0: all rows up to its own, 1: a window of `reach` rows, 2: chunks of `reach` rows
    reach: u32,
    position: u32,         // word that has the position of the segment's first token
    offset: u32,           // from that token to the first of its run
    first_token: u32,      // of those that are computed, in the run
    tokens: u32,           // that are computed
    first_partition: u32,  // of those that are computed
    base_partition: u32,   // the first that states have room for
    partitions: u32,       // that states have room for, of each head
    first_row: u32,        // the first row of the windows
    key_skip: u32,         // units in the window before it: of 16 bytes where rows are read so, of 4 else
    key_stride: u32,       // units from row to row
    value_skip: u32,
    value_stride: u32,
    elements: u32,         // of keys, and those of values times 4. 0: f32, 1: f16, 2: bf16, 3: q8_0
    ahead: u32,            // behind the last row that all tokens see, or 0: each sees those up to its own
    split: u32,            // elements of keys whose products are added one after the other
    merged: u32,           // whether a workgroup has all partitions of its query rows, which are merged then
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<f32>;

// Rows of a partition whose values are added one after the other.
const RUN = 8u;
const RUNS = PARTITION / RUN;

// Below every score that is finite.
const LOWEST = -3.0e38;

fn capped(score: f32) -> f32 {
    if p.soft_cap == 0.0 {
        return score;
    }
    // tanh by an exponential that does not overflow.
    let x = score / p.soft_cap;
    let power = exp(-2.0 * abs(x));
    return sign(x) * p.soft_cap * ((1.0 - power) / (1.0 + power));
}

// The position of the first token that is computed. It is not among what kernels are told with a dispatch, so that a step is
// the same as the one before it.
fn first_position() -> u32 {
    return bitcast<u32>(arena[p.position]) + p.offset + p.first_token;
}

// The word of a query row's state in a partition.
fn state_of(query_row: u32, head: u32, part: u32) -> u32 {
    let number = query_row / p.group * p.query_heads + head * p.group + query_row % p.group;
    return p.states + (number * p.partitions + part - p.base_partition) * (p.value_dim + 2u);
}

// The word of a query row.
fn query_of(query_row: u32, head: u32) -> u32 {
    let token = p.first_token + query_row / p.group;
    return p.queries + (token * p.query_heads + head * p.group + query_row % p.group) * p.key_dim;
}

// Whether a query row sees the row `row`.
fn sees(query_row: u32, row: u32) -> bool {
    let own = first_position() + query_row / p.group;
    return row >= first_row(own) && row < seen_to(own);
}

// The rows of a partition that any of the query rows from `first` to before `end` sees: the first, and behind the last.
fn seen_of(part: u32, first: u32, end: u32) -> vec2<u32> {
    let position = first_position();
    return vec2<u32>(
        max(first_row(position + first / p.group), part * PARTITION),
        min(seen_to(position + (end - 1u) / p.group), (part + 1u) * PARTITION),
    );
}

// Eight elements of a row.
struct Eight {
    low: vec4<f32>,
    high: vec4<f32>,
}
