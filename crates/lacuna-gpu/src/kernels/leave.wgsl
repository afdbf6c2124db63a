// What tiles of quantized weights and of floats have in common: how large they are, and where sums go.

const TILE = 64u;

// The sums of one of `count` places with every sixteenth row.
fn leave_rows(first: u32, place: u32, count: u32, row: u32, sums: vec4<f32>) {
    if place >= count {
        return;
    }
    let token = output_row(first + place);
    if row < p.count {
        leave(token, row, sums.x);
    }
    if row + 16u < p.count {
        leave(token, row + 16u, sums.y);
    }
    if row + 32u < p.count {
        leave(token, row + 32u, sums.z);
    }
    if row + 48u < p.count {
        leave(token, row + 48u, sums.w);
    }
}
