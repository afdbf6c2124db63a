// Rows of a sequence as attention divides them, for kernels that have `p.mask`, `p.reach` and `p.ahead`.

// Rows of a partition.
const PARTITION = 64u;

// The first row that the token of this position sees.
fn first_row(own: u32) -> u32 {
    if p.mask == 1u && own + 1u > p.reach {
        return own + 1u - p.reach;
    }
    if p.mask == 2u {
        return own / p.reach * p.reach;
    }
    return 0u;
}

// Behind the last row that it sees: its own, or that of the image it is of.
fn seen_to(own: u32) -> u32 {
    return select(own + 1u, p.ahead, p.ahead > 0u);
}
