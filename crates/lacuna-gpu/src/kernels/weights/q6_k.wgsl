// A row: nibbles, then two words of fifth and sixth bits of each 32, then sixteen scales `i8` of each 256, then `d: f16`
// of each 256; weight `d * scale * (q - 32)`, sixteen weights to a scale.
const LESS = 0;
const HALVES_DIFFER = true;
const HAS_MINIMUM = false;

fn high_bits(bits: u32) -> vec4<u32> {
    return ((vec4<u32>(bits) >> vec4<u32>(0u, 2u, 4u, 6u)) & vec4<u32>(0x03030303u)) << vec4<u32>(4u);
}

fn load(row: u32, number: u32) -> Unit {
    let packed = weights[row + number];
    let behind = 4u * (row + p.units);
    let at = behind + 2u * number;
    let low = (packed & NIBBLES) | high_bits(words[at]);
    let high = ((packed >> vec4<u32>(4u)) & NIBBLES) | high_bits(words[at + 1u]);
    let bytes = 4u * (behind + 2u * p.units);
    let scales = half_word(bytes + 2u * number);
    let worth = half_float(bytes + 2u * p.units + number / 8u * 2u);
    let first = f32(bitcast<i32>(scales << 24u) >> 24u);
    let second = f32(bitcast<i32>(scales << 16u) >> 24u);
    return Unit(less(low, 32u), less(high, 32u), worth * vec2<f32>(first, second), 0.0);
}
