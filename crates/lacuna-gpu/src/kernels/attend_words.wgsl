// Keys and values read by the word: where heads are no whole vectors of 16 bytes, or where elements are blocks of 32 bytes
// behind what one is worth, a float of 16 bits: q8_0. Two blocks are 17 words; the bytes of the first begin in the middle of
// one. Queries are made blocks like activations before products with such weights, so that sums within blocks are exact, and
// the same as the processor's.

const BLOCKS = 3u;
// Bytes of the four query rows' blocks, four to a word, and what they are worth.
var<workgroup> query_bytes: array<vec4<u32>, 144>;
var<workgroup> query_scales: array<vec4<f32>, 18>;

fn make_ready(thread: u32) {
    if p.elements % 4u != BLOCKS {
        return;
    }
    for (var block = thread; block < p.key_dim / 32u; block += THREADS) {
        // Splits are whole blocks.
        let first = 32u * block + 32u * block / p.split;
        var largest = vec4<f32>();
        for (var i = 0u; i < 32u; i++) {
            largest = max(largest, abs(space[first + i]));
        }
        let units = array<vec2<f32>, 4>(
            unit_of(largest.x),
            unit_of(largest.y),
            unit_of(largest.z),
            unit_of(largest.w),
        );
        query_scales[block] = vec4<f32>(units[0].x, units[1].x, units[2].x, units[3].x);
        let inverse = vec4<f32>(units[0].y, units[1].y, units[2].y, units[3].y);
        for (var i = 0u; i < 8u; i++) {
            var packed = vec4<u32>();
            for (var byte = 0u; byte < 4u; byte++) {
                let rounded = vec4<i32>(round(space[first + 4u * i + byte] * inverse));
                packed |= (bitcast<vec4<u32>>(rounded) & vec4<u32>(0xffu)) << vec4<u32>(8u * byte);
            }
            query_bytes[8u * block + i] = packed;
        }
    }
    workgroupBarrier();
}

// Sums of products of a word of bytes with that of each query row.
fn dots(word: u32, query: vec4<u32>) -> vec4<i32> {
    return vec4<i32>(
        dot4I8Packed(word, query.x),
        dot4I8Packed(word, query.y),
        dot4I8Packed(word, query.z),
        dot4I8Packed(word, query.w),
    );
}

// Two elements in a word.
fn pair_of(word: u32, element: u32) -> vec2<f32> {
    if element == 1u {
        return unpack2x16float(word);
    }
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}

fn scores_of(row: u32, head: u32, split: u32) -> vec4<f32> {
    let element = p.elements % 4u;
    let first = split * p.split;
    let end = min(first + p.split, p.key_dim);
    let start = p.key_skip + (row - p.first_row) * p.key_stride;
    var sums = vec4<f32>();
    if element == BLOCKS {
        for (var block = first / 32u; block < end / 32u; block++) {
            // The blocks of a head begin where a pair does or in the middle of one.
            let number = head * (p.key_dim / 32u) + block;
            let at = start + number / 2u * 17u;
            var all = vec4<i32>();
            var scale = 0.0;
            if number % 2u == 0u {
                var word = key_word(at);
                scale = unpack2x16float(word).x;
                for (var i = 0u; i < 8u; i++) {
                    let next = key_word(at + i + 1u);
                    all += dots((word >> 16u) | (next << 16u), query_bytes[8u * block + i]);
                    word = next;
                }
            } else {
                scale = unpack2x16float(key_word(at + 8u)).y;
                for (var i = 0u; i < 8u; i++) {
                    all += dots(key_word(at + 9u + i), query_bytes[8u * block + i]);
                }
            }
            sums = fma(scale * query_scales[block], vec4<f32>(all), sums);
        }
        return sums;
    }
    var query = first + split;
    if element == 0u {
        let at = start + head * p.key_dim;
        for (var i = first; i < end; i++) {
            sums = fma(vec4<f32>(bitcast<f32>(key_word(at + i))), space[query], sums);
            query += 1u;
        }
    } else {
        let at = start + head * p.key_dim / 2u;
        for (var i = first; i < end; i += 2u) {
            let two = pair_of(key_word(at + i / 2u), element);
            sums = fma(vec4<f32>(two.x), space[query], sums);
            sums = fma(vec4<f32>(two.y), space[query + 1u], sums);
            query += 2u;
        }
    }
    return sums;
}

fn value_of(start: u32, element: u32, at: u32) -> f32 {
    if element == 0u {
        return bitcast<f32>(value_word(start + at));
    }
    if element == BLOCKS {
        let block = at / 32u;
        let pair = start + block / 2u * 17u;
        let odd = block % 2u;
        let byte = odd * 34u + 2u + at % 32u;
        let scales = unpack2x16float(value_word(pair + odd * 8u));
        let whole = bitcast<i32>(value_word(pair + byte / 4u) << (24u - 8u * (byte % 4u))) >> 24u;
        return select(scales.x, scales.y, odd == 1u) * f32(whole);
    }
    let two = pair_of(value_word(start + at / 2u), element);
    return select(two.x, two.y, at % 2u == 1u);
}

fn values_of(row: u32, head: u32, i: u32) -> Eight {
    let element = p.elements / 4u;
    let start = p.value_skip + (row - p.first_row) * p.value_stride;
    var eight = Eight();
    for (var more = 0u; more < min(p.value_dim - i, 8u); more++) {
        let value = value_of(start, element, head * p.value_dim + i + more);
        if more < 4u {
            eight.low[more] = value;
        } else {
            eight.high[more - 4u] = value;
        }
    }
    return eight;
}
