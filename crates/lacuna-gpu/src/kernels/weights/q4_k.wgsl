// A row: nibbles, then sixteen bytes of scales and minima of each 256; weight `d * scale * q - dmin * minimum`.
const LESS = 0;
const HALVES_DIFFER = false;
const HAS_MINIMUM = true;

fn load(row: u32, number: u32) -> Unit {
    let packed = weights[row + number];
    let nested = nested_scales(weights[row + p.units + number / 8u], number % 8u);
    return Unit(packed & NIBBLES, (packed >> vec4<u32>(4u)) & NIBBLES, vec2<f32>(nested.x), nested.y);
}
