// Nibbles that name one of sixteen levels. What the two of a byte name is in a table that the threads of a workgroup share:
// one load for two weights, where finding each by itself would take more time than its bytes take to come.

// The levels, four to a word.
const LEVELS = array<u32, 4>(0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u);

// For each byte the level of its lower nibble, and that of the upper one from bit 16 on.
var<workgroup> pairs: array<u32, 256>;

fn level(nibble: u32) -> u32 {
    var levels = LEVELS;
    return (levels[nibble / 4u] >> (8u * (nibble % 4u))) & 0xffu;
}

fn begin(thread: u32) {
    for (var i = thread; i < 256u; i += THREADS) {
        pairs[i] = level(i % 16u) | (level(i / 16u) << 16u);
    }
    workgroupBarrier();
}

// What the lower nibbles of the bytes of a word name, and what the upper ones do.
fn levels_of(word: u32) -> vec2<u32> {
    let first = pairs[word & 0xffu] | (pairs[(word >> 8u) & 0xffu] << 8u);
    let second = pairs[(word >> 16u) & 0xffu] | (pairs[word >> 24u] << 8u);
    return vec2<u32>((first & 0xffffu) | (second << 16u), (first >> 16u) | (second & 0xffff0000u));
}

fn unit_of(packed: vec4<u32>, scale: f32) -> Unit {
    let x = levels_of(packed.x);
    let y = levels_of(packed.y);
    let z = levels_of(packed.z);
    let w = levels_of(packed.w);
    return Unit(vec4<u32>(x.x, y.x, z.x, w.x), vec4<u32>(x.y, y.y, z.y, w.y), vec2<f32>(scale), 0.0);
}
