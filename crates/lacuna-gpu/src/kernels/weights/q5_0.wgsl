// A row: nibbles, then a word of fifth bits, then `d: f16` of each 32; weight `d * (q - 16)`.
const LESS = 16;
const HALVES_DIFFER = false;
const HAS_MINIMUM = false;

fn load(row: u32, number: u32) -> Unit {
    let packed = weights[row + number];
    let bits = words[4u * (row + p.units) + number];
    let scale = half_float(16u * (row + p.units) + 4u * p.units + number * 2u);
    let low = (packed & NIBBLES) | fifth_bits(bits, 0u);
    let high = ((packed >> vec4<u32>(4u)) & NIBBLES) | fifth_bits(bits, 4u);
    return Unit(low, high, vec2<f32>(scale), 0.0);
}
