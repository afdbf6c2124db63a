// Logits as whole numbers that have their order: what is found by them depends on nothing else. Zeros are alike, and one that
// is no finite number goes before all others.

// No token.
const NONE = 0xffffffffu;
const NOT_FINITE = 0xffffffffu;

// Larger for a larger logit; never zero.
fn key_of(bits: u32) -> u32 {
    let magnitude = bits & 0x7fffffffu;
    if magnitude >= 0x7f800000u {
        return NOT_FINITE;
    }
    if magnitude == 0u {
        return 0x80000000u;
    }
    return select(bits | 0x80000000u, ~bits, bits >= 0x80000000u);
}

// Of a key and a token, and another: which is before the other in a list that begins with the largest, of equal ones the first.
fn comes_first(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.x > b.x || (a.x == b.x && a.y < b.y);
}
