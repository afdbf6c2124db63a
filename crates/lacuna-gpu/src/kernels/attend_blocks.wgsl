// Where keys or values are blocks of 32 bytes behind what one is worth, a float of 16 bits: q8_0. Two blocks are 17 words;
// the bytes of the first begin in the middle of one. Queries are made blocks like activations before products with such
// weights, so that sums within blocks are exact, and the same as the processor's.

const BLOCKS = 3u;
// What is below this counts as zero; its reciprocal would overflow.
const SMALLEST = 1e-35;

// Bytes of the query's blocks, four to a word, and what they are worth.
var<workgroup> query_bytes: array<u32, 144>;
var<workgroup> query_scales: array<f32, 18>;

fn make_ready(thread: u32) {
    if p.elements % 4u != BLOCKS {
        return;
    }
    for (var block = thread; block < p.key_dim / 32u; block += THREADS) {
        var largest = 0.0;
        for (var i = 0u; i < 32u; i++) {
            largest = max(largest, abs(query[32u * block + i]));
        }
        var inverse = 0.0;
        query_scales[block] = 0.0;
        if largest >= SMALLEST {
            inverse = 127.0 / largest;
            query_scales[block] = largest / 127.0;
        }
        for (var i = 0u; i < 8u; i++) {
            let at = 32u * block + 4u * i;
            let four = vec4<f32>(query[at], query[at + 1u], query[at + 2u], query[at + 3u]);
            let bytes = bitcast<vec4<u32>>(vec4<i32>(round(four * inverse))) & vec4<u32>(0xffu);
            query_bytes[8u * block + i] = bytes.x | (bytes.y << 8u) | (bytes.z << 16u) | (bytes.w << 24u);
        }
    }
    workgroupBarrier();
}

fn score(row: u32, head: u32) -> f32 {
    if p.elements % 4u != BLOCKS {
        return score_of_floats(row, head);
    }
    let pairs = p.key_dim / 64u;
    let start = p.key_skip + (row - p.first_row) * p.key_stride + head * pairs * 17u;
    var sum = 0.0;
    for (var pair = 0u; pair < pairs; pair++) {
        let at = start + 17u * pair;
        var word = keys[at];
        let first_scale = unpack2x16float(word).x;
        var first = 0;
        for (var i = 0u; i < 8u; i++) {
            let next = keys[at + i + 1u];
            first += dot4I8Packed((word >> 16u) | (next << 16u), query_bytes[16u * pair + i]);
            word = next;
        }
        let second_scale = unpack2x16float(word).y;
        var second = 0;
        for (var i = 0u; i < 8u; i++) {
            second += dot4I8Packed(keys[at + 9u + i], query_bytes[16u * pair + 8u + i]);
        }
        sum = fma(first_scale * query_scales[2u * pair], f32(first), sum);
        sum = fma(second_scale * query_scales[2u * pair + 1u], f32(second), sum);
    }
    return sum;
}

fn value(row: u32, head: u32, i: u32) -> f32 {
    if p.elements / 4u != BLOCKS {
        return value_of_floats(row, head, i);
    }
    let at = head * p.value_dim + i;
    let block = at / 32u;
    let start = p.value_skip + (row - p.first_row) * p.value_stride + block / 2u * 17u;
    let odd = block % 2u;
    let byte = odd * 34u + 2u + at % 32u;
    let scales = unpack2x16float(values[start + odd * 8u]);
    let element = bitcast<i32>(values[start + byte / 4u] << (24u - 8u * (byte % 4u))) >> 24u;
    return select(scales.x, scales.y, odd == 1u) * f32(element);
}
