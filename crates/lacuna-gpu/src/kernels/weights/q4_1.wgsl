// A row: nibbles, then `d: f16` and `m: f16` of each 32; weight `d * q + m`.
const LESS = 0;
const HALVES_DIFFER = false;
const HAS_MINIMUM = true;

fn load(row: u32, number: u32) -> Unit {
    let packed = weights[row + number];
    let two = unpack2x16float(words[4u * (row + p.units) + number]);
    return Unit(packed & NIBBLES, (packed >> vec4<u32>(4u)) & NIBBLES, vec2<f32>(two.x), two.y);
}
