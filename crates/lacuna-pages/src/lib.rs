//! lacuna-pages
