// Products of matrices with rows: output[t][r] = sum over c of weight[r][c] * input[t][c], and a bias. What is in front
// of both kernels, that for a few tokens and that for many. `all.wgsl` or `experts.wgsl` behind it says which rows a
// workgroup has, and which matrix: the only one, or an expert's.
//
// Sums are made in an order that the width alone decides, the same in both: the units of a row are dealt to 32 lanes in
// turn, each lane adds its own one after the other, and the sums of lanes are added one after the other. So a product has
// the same bits whatever is in its batch. What a unit is, and how it is added, is in the file of the weight type that is
// put behind.

struct Params {
    input: u32,      // word of the first row: elements, or the bytes that `quantize` made
    scales: u32,     // and its scales and sums, where the weights are quantized
    sums: u32,
    output: u32,     // word of the first row that is written
    stride: u32,     // elements of such a row
    first_row: u32,  // number of the window's first row
    count: u32,      // rows in the window
    row_size: u32,   // of a row of the matrix, in sixteen bytes
    skip: u32,       // what is in the window before its first row, in sixteen bytes
    columns: u32,
    units: u32,      // units in a row
    tokens: u32,
    has_bias: u32,   // whether rows end with one
    // Of experts' matrices alone, which lie one after the other:
    tiles: u32,      // word of what workgroups have
    order: u32,      // word of the first choice, by expert
    used: u32,       // choices that have a row of the input together
    first_expert: u32,  // whose matrix the window begins with
    experts: u32,       // in the window
    expert_size: u32,   // from one matrix to the next, in sixteen bytes
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read_write> arena: array<u32>;
@group(0) @binding(1) var<storage, read> weights: array<vec4<u32>>;
// The same by the word.
@group(0) @binding(2) var<storage, read> words: array<u32>;
// All of the arena, sixteen bytes at a time; what is read of it is not written.
@group(0) @binding(3) var<storage, read> rows: array<vec4<u32>>;

const LANES = 32u;

// The two bytes from `at` on, which is a multiple of two.
fn half_word(at: u32) -> u32 {
    return (words[at / 4u] >> (8u * (at % 4u))) & 0xffffu;
}

// The float of 16 bits at `at`.
fn half_float(at: u32) -> f32 {
    return unpack2x16float(half_word(at)).x;
}

fn place_of(row: u32) -> u32 {
    return p.skip + matrix + row * p.row_size;
}

// The sum of an output's row with a row of the matrix.
fn leave(output_row: u32, row: u32, sum: f32) {
    var y = sum;
    if p.has_bias != 0u {
        y += bitcast<f32>(words[4u * (place_of(row + 1u) - 1u)]);
    }
    arena[p.output + output_row * p.stride + p.first_row + row] = bitcast<u32>(y);
}
