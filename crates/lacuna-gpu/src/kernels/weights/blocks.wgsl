// Blocks of small whole numbers: a unit is 32 columns. `load` of the type unpacks them to signed bytes, four to
// a word, and says what one is worth in each half and what is taken off for every unit of the input. Sums of
// products of bytes are exact.

struct Unit {
    low: vec4<u32>,
    high: vec4<u32>,
    scales: vec2<f32>,
    minimum: f32,
}

fn dot_of(weights: vec4<u32>, at: u32) -> i32 {
    return dot4I8Packed(weights.x, arena[at])
        + dot4I8Packed(weights.y, arena[at + 1u])
        + dot4I8Packed(weights.z, arena[at + 2u])
        + dot4I8Packed(weights.w, arena[at + 3u]);
}

fn share(unit: Unit, number: u32, token: u32) -> f32 {
    let block = token * p.units + number;
    let at = p.input + block * 8u;
    let sum = f32(bitcast<i32>(arena[p.sums + block]));
    let low = unit.scales.x * f32(dot_of(unit.low, at));
    let high = unit.scales.y * f32(dot_of(unit.high, at + 4u));
    return bitcast<f32>(arena[p.scales + block]) * (low + high - unit.minimum * sum);
}

// The four words from `at` on.
fn words(at: u32) -> vec4<u32> {
    return vec4<u32>(word(at), word(at + 4u), word(at + 8u), word(at + 12u));
}

// Bytes below 128 less a number up to 128, each for itself: no byte borrows from the next.
fn less(bytes: vec4<u32>, number: u32) -> vec4<u32> {
    return ((bytes | vec4<u32>(0x80808080u)) - vec4<u32>(number * 0x01010101u)) ^ vec4<u32>(0x80808080u);
}

const NIBBLES = vec4<u32>(0x0f0f0f0fu);
