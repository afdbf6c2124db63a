// Weights that are small whole numbers: a unit is 32 columns. `load` of the type makes bytes of them, four to a word, and
// says what one is worth in each half, and what is added for every unit of the input. Sums of products of bytes are exact,
// so only the order of units counts: for each `fma` one.

struct Unit {
    low: vec4<u32>,
    high: vec4<u32>,
    scales: vec2<f32>,
    minimum: f32,
}

// 32 columns of a token: bytes, what one is worth, and their sum.
struct Input {
    low: vec4<u32>,
    high: vec4<u32>,
    scale: f32,
    sum: i32,
}

const NIBBLES = vec4<u32>(0x0f0f0f0fu);

fn dot_of(a: vec4<u32>, b: vec4<u32>) -> i32 {
    return dot4I8Packed(a.x, b.x) + dot4I8Packed(a.y, b.y)
        + dot4I8Packed(a.z, b.z) + dot4I8Packed(a.w, b.w);
}

fn input_of(token: u32, number: u32) -> Input {
    let block = token * p.units + number;
    let at = p.input / 4u + block * 2u;
    let scale = bitcast<f32>(arena[p.scales + block]);
    return Input(rows[at], rows[at + 1u], scale, bitcast<i32>(arena[p.sums + block]));
}

// `sum` and the products of a unit with 32 columns of a token.
fn add(sum: f32, unit: Unit, input: Input) -> f32 {
    if HALVES_DIFFER {
        let low = fma(input.scale * unit.scales.x, f32(dot_of(unit.low, input.low)), sum);
        return fma(input.scale * unit.scales.y, f32(dot_of(unit.high, input.high)), low);
    }
    var products = dot_of(unit.low, input.low) + dot_of(unit.high, input.high);
    if LESS != 0 {
        products -= LESS * input.sum;
    }
    var all = fma(input.scale * unit.scales.x, f32(products), sum);
    if HAS_MINIMUM {
        all = fma(input.scale * unit.minimum, f32(input.sum), all);
    }
    return all;
}

// Bytes below 128 less a number up to 128, each for itself: no byte borrows from the next.
fn less(bytes: vec4<u32>, number: u32) -> vec4<u32> {
    return ((bytes | vec4<u32>(0x80808080u)) - vec4<u32>(number * 0x01010101u)) ^ vec4<u32>(0x80808080u);
}

// What bits beyond the fourth of sixteen weights are worth, from a word that has those of 32, the first `first` of four.
fn fifth_bits(bits: u32, first: u32) -> vec4<u32> {
    return ((vec4<u32>(bits >> first) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(0x01010101u)) << vec4<u32>(4u);
}

// Scales and minima of six bits of eight sub-blocks, behind what they are worth: what Q4_K and Q5_K have in common.
fn nested_scales(head: vec4<u32>, sub_block: u32) -> vec2<f32> {
    let worth = unpack2x16float(head.x);
    let shift = 8u * (sub_block % 4u);
    let first = (head.y >> shift) & 0xffu;
    let second = (head.z >> shift) & 0xffu;
    let last = (head.w >> shift) & 0xffu;
    var scale = first & 63u;
    var minimum = second & 63u;
    if sub_block >= 4u {
        scale = (last & 15u) | ((first >> 6u) << 4u);
        minimum = (last >> 4u) | ((second >> 6u) << 4u);
    }
    return vec2<f32>(worth.x * f32(scale), -(worth.y * f32(minimum)));
}
