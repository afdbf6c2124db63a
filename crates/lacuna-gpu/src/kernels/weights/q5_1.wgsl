// A row: nibbles, then a word of fifth bits, then `d: f16` and `m: f16` of each 32; weight `d * q + m`.
const LESS = 0;
const HALVES_DIFFER = false;
const HAS_MINIMUM = true;

fn load(row: u32, number: u32) -> Unit {
    let packed = weights[row + number];
    let behind = 4u * (row + p.units);
    let bits = words[behind + number];
    let two = unpack2x16float(words[behind + p.units + number]);
    let low = (packed & NIBBLES) | fifth_bits(bits, 0u);
    let high = ((packed >> vec4<u32>(4u)) & NIBBLES) | fifth_bits(bits, 4u);
    return Unit(low, high, vec2<f32>(two.x), two.y);
}
