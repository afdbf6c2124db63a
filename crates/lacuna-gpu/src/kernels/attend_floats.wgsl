// Rows whose elements are floats.

// Two elements in a word.
fn pair(word: u32, element: u32) -> vec2<f32> {
    if element == 1u {
        return unpack2x16float(word);
    }
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}

fn score_of_floats(row: u32, head: u32) -> f32 {
    let element = p.elements % 4u;
    let start = p.key_skip + (row - p.first_row) * p.key_stride;
    var sum = 0.0;
    if element == 0u {
        let at = start + head * p.key_dim;
        for (var i = 0u; i < p.key_dim; i++) {
            sum += query[i] * bitcast<f32>(keys[at + i]);
        }
    } else {
        let at = start + head * p.key_dim / 2u;
        for (var i = 0u; i < p.key_dim / 2u; i++) {
            let two = pair(keys[at + i], element);
            sum += query[2u * i] * two.x;
            sum += query[2u * i + 1u] * two.y;
        }
    }
    return sum;
}

fn value_of_floats(row: u32, head: u32, i: u32) -> f32 {
    let element = p.elements / 4u;
    let start = p.value_skip + (row - p.first_row) * p.value_stride;
    let at = head * p.value_dim + i;
    if element == 0u {
        return bitcast<f32>(values[start + at]);
    }
    let two = pair(values[start + at / 2u], element);
    return select(two.x, two.y, at % 2u == 1u);
}
