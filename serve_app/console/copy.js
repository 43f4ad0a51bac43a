// A button beside each text that is there to be copied. Browsers allow it over https and on this machine alone.
"use strict";

for (const text of navigator.clipboard ? document.querySelectorAll("pre.copied") : []) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(text.textContent);
    button.textContent = "Copied";
  });
  text.after(button);
}
