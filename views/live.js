"use strict";
// Shows each state of the run that the server sends. The server escapes every text, and the page's policy allows no
// other script. When the run has ended, the server has its report in place of this page.

const board = document.querySelector("main");
const events = new EventSource("/events");
events.onmessage = ({ data }) => (board.innerHTML = JSON.parse(data));
events.addEventListener("end", () => {
  events.close();
  location.reload();
});
events.onerror = () => {
  events.close();
  const text = "The connection has ended. Reload the page while the view is open.";
  board.prepend(Object.assign(document.createElement("p"), { className: "lead", textContent: text }));
};
