// A row: nibbles, then of each 256 `d: f16`, two bytes of the upper two bits of eight scales, and four of their lower four;
// weight `d * (scale - 32) * level`.
const LESS = 0;
const HALVES_DIFFER = false;
const HAS_MINIMUM = false;

fn load(row: u32, number: u32) -> Unit {
    let at = 4u * (row + p.units) + number / 8u * 2u;
    let head = words[at];
    let sub_block = number % 8u;
    let low = (words[at + 1u] >> (4u * sub_block)) & 15u;
    let high = (head >> (16u + 2u * sub_block)) & 3u;
    let scale = f32(i32(low | (high << 4u)) - 32);
    return unit_of(weights[row + number], unpack2x16float(head).x * scale);
}
