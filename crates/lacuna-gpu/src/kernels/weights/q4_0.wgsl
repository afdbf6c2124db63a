// A row: nibbles, then `d: f16` of each 32; weight `d * (q - 8)`.
const LESS = 8;
const HALVES_DIFFER = false;
const HAS_MINIMUM = false;

fn load(row: u32, number: u32) -> Unit {
    let packed = weights[row + number];
    let scale = half_float(16u * (row + p.units) + number * 2u);
    return Unit(packed & NIBBLES, (packed >> vec4<u32>(4u)) & NIBBLES, vec2<f32>(scale), 0.0);
}
