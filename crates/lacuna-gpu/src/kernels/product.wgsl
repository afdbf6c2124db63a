// Products of a matrix with rows: output[t][r] = sum over c of weight[r][c] * input[t][c], and a bias.
//
// Eight rows of the matrix to a workgroup, sixteen threads to each; a thread takes every sixteenth unit of
// columns, for up to four tokens at once, and the sixteen are added as halves of a tree. So the order of a
// sum depends on the width alone: not on how many tokens there are, nor on which of four a token is, nor on
// what a subgroup is. What a unit is, and what it makes of a token, is in the file of the weight type that
// is put behind this one.

struct Params {
    input: u32,      // word of the first row: elements, or the bytes that `quantize` made
    scales: u32,     // and its scales and sums, where the weights are quantized
    sums: u32,
    output: u32,     // word of the first row that is written
    stride: u32,     // elements of such a row
    first_row: u32,  // number of the window's first row
    rows: u32,       // rows in the window
    row_bytes: u32,
    skip: u32,       // bytes in the window before its first row
    columns: u32,
    units: u32,      // units in a row
    tokens: u32,
    bias: u32,       // where the biases begin in `vectors`, or NONE
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> weights: array<u32>;
@group(0) @binding(2) var<storage, read> vectors: array<f32>;

const LANES = 16u;
const ROWS = 8u;
const TOKENS = 4u;
const NONE = 0xffffffffu;

var<workgroup> partial: array<vec4<f32>, 128>;

// The four bytes from `at` on, which is a multiple of two.
fn word(at: u32) -> u32 {
    let low = weights[at / 4u];
    if at % 4u == 0u {
        return low;
    }
    return (low >> 16u) | (weights[at / 4u + 1u] << 16u);
}

// The two bytes from `at` on, which is a multiple of two.
fn half_word(at: u32) -> u32 {
    return (weights[at / 4u] >> (8u * (at % 4u))) & 0xffffu;
}

fn byte(at: u32) -> u32 {
    return (weights[at / 4u] >> (8u * (at % 4u))) & 0xffu;
}

// The float of 16 bits at `at`.
fn half_float(at: u32) -> f32 {
    return unpack2x16float(half_word(at)).x;
}

@compute @workgroup_size(128)
fn product(
    @builtin(local_invocation_index) thread: u32,
    @builtin(workgroup_id) group: vec3<u32>,
) {
    let lane = thread % LANES;
    let row = group.x * ROWS + thread / LANES;
    let first = group.y * TOKENS;
    let count = min(p.tokens - first, TOKENS);
    var sums = vec4<f32>();
    if row < p.rows {
        let start = p.skip + row * p.row_bytes;
        for (var number = lane; number < p.units; number += LANES) {
            let unit = load(start, number);
            sums.x += share(unit, number, first);
            if count > 1u {
                sums.y += share(unit, number, first + 1u);
            }
            if count > 2u {
                sums.z += share(unit, number, first + 2u);
            }
            if count > 3u {
                sums.w += share(unit, number, first + 3u);
            }
        }
    }
    partial[thread] = sums;
    workgroupBarrier();
    for (var half = LANES / 2u; half > 0u; half /= 2u) {
        if lane < half {
            partial[thread] += partial[thread + half];
        }
        workgroupBarrier();
    }
    if row < p.rows && lane < count {
        let number = p.first_row + row;
        var y = partial[thread - lane][lane];
        if p.bias != NONE {
            y += vectors[p.bias + number];
        }
        arena[p.output + (first + lane) * p.stride + number] = bitcast<u32>(y);
    }
}
