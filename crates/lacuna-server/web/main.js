import * as chat from "./chat.js";
import * as memory from "./memory.js";

chat.start();
memory.start();

const shown = document.getElementById("show-memory");
shown.addEventListener("click", () => {
  const is = document.querySelector("main").classList.toggle("memory-shown");
  shown.setAttribute("aria-expanded", is);
  shown.textContent = is ? "Chat" : "Memory";
});
