// Pages whose units are words.

alias Unit = u32;
const PAGE_BITS = 14u;
